// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/service"
)

// A member is adopted from outside: its process opens the socket and needs no knowledge of weir. Here it is this
// process.
func ExampleMember_Adopt() {
	socket, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer socket.Close()
	listen, err := service.ParseListen("udp " + socket.LocalAddr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	ns, err := netns.Current()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ns.Close()
	member := service.Member{PID: os.Getpid()}
	adopted, err := member.Adopt(context.Background(), ns, service.Spec{Name: "telemetry", Listen: []service.Listen{listen}})
	if err != nil {
		fmt.Println(err) // for example service.ErrNoSocket for a missing socket
		return
	}
	defer adopted.Close() // a socket stays open while a duplicate is open
	for _, s := range adopted.Sockets {
		fmt.Println(s.PID == os.Getpid(), s.FD >= 0)
	}
	// Output: true true
}
