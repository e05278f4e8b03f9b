// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"errors"
	"fmt"
	"net"

	"github.com/weir-project/weir/clients/go/guard"
)

// A DNS server limits its own socket to 20,000 packets per second. Under a flood, the clients from before keep their answers.
// Without the right to load a program, start it by `weir guard grant --limit 20kpps -- COMMAND`.
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

// Limits are written as people write them.
func ExampleParseLimit() {
	l, err := guard.ParseLimit("1.5Mpps")
	fmt.Println(uint64(l), err)
	_, err = guard.ParseLimit("0pps")
	fmt.Println(err)
	// Output:
	// 1500000 <nil>
	// limit "0pps": nothing would pass: want 1pps or more, or leave it out for none
}
