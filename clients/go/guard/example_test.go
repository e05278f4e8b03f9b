// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"

	"github.com/weir-project/weir/clients/go/guard"
)

// A DNS server limits its own socket to 20,000 packets per second. Under a flood, known clients
// still get answers. Without the right to load a program, start it by `weir guard grant --limit
// 20kpps -- COMMAND`.
func ExampleAttach() {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	g, err := guard.Attach(conn, 20_000)
	if errors.Is(err, guard.ErrNoGrant) {
		fmt.Println("serving without a guard:", err)
		return
	} else if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	fmt.Println(g.Counts().Refused, "refused")
}

// Limits are written with units.
func ExampleParseLimit() {
	l, err := guard.ParseLimit("1.5Mpps")
	fmt.Println(uint64(l), err)
	_, err = guard.ParseLimit("0pps")
	fmt.Println(err)
	// Output:
	// 1500000 <nil>
	// limit "0pps": nothing would pass: want 1pps or more, or leave it out for none
}

// Several sockets share one limit, which changes while they serve.
func ExampleNew() {
	g, err := guard.New(20_000)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	for _, address := range []string{"127.0.0.1:5353", "[::1]:5353"} {
		conn, err := net.ListenPacket("udp", address)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer conn.Close()
		if err := g.Attach(conn.(*net.UDPConn)); err != nil {
			fmt.Println(err) // guard.ErrOccupied: the socket has another filter
			return
		}
	}
	if err := g.SetLimits(guard.Limits{Total: 50_000}); err != nil {
		fmt.Println(err)
	}
}

// A privileged supervisor gives a daemon a guard. Attach in the daemon finds it, and accepts no higher limit.
func ExampleNewGrant() {
	grant, err := guard.NewGrant(20_000)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer grant.Close()
	daemon := exec.Command("/usr/local/bin/resolver")
	daemon.ExtraFiles = grant.Files()
	daemon.Env = append(os.Environ(), grant.Env(3)) // 3 is the first of ExtraFiles
	if err := daemon.Start(); err != nil {
		fmt.Println(err)
	}
}
