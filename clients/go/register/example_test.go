// SPDX-License-Identifier: Apache-2.0

package register_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/weir-project/weir/clients/go/register"
)

// A collector opens its socket, then takes slot 0 of the service telemetry. It also serves without
// weir.
func ExampleSlot() {
	socket, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	switch err := register.Slot(ctx, "telemetry", 0); {
	case errors.Is(err, register.ErrNoServe):
		fmt.Println("weir serve does not run: the socket serves alone")
	case err != nil:
		fmt.Println(err)
	}
}

// Each weir serve has its own socket. Without one, ErrNoServe is immediate.
func ExampleClient_Slot() {
	err := register.Client{Socket: "/nonexistent/register.sock"}.Slot(context.Background(), "telemetry", 0)
	fmt.Println(errors.Is(err, register.ErrNoServe))
	// Output: true
}
