// SPDX-License-Identifier: Apache-2.0

// Command register-go is a self-registering collector for slot 0 of the service telemetry:
//
//	services:
//	  telemetry:
//	    listen: [udp 0.0.0.0:4739]
//	    members: [{slot: 0, user: collector}]
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"

	"github.com/weir-project/weir/clients/go/register"
)

func main() {
	address := ":4739"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	socket, err := net.ListenPacket("udp4", address)
	if err != nil {
		log.Fatal(err)
	}
	if err := register.Slot(context.Background(), "telemetry", 0); err != nil {
		log.Fatal(err)
	}
	fmt.Println("registered")
	packet := make([]byte, 65535)
	for {
		n, from, err := socket.ReadFrom(packet)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d bytes from %s\n", n, from)
	}
}
