// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"errors"
	"net"
	"testing"

	"github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// TestAttach counts the datagrams of a socket and closes the guard. The tests of feature/guard
// flood sockets.
func TestAttach(t *testing.T) {
	nstest.NeedRoot(t)
	nstest.Enter(t)
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	g, err := guard.Attach(server, 100)
	if errors.Is(err, guard.ErrUnsupported) {
		t.Skip("need: kernel", err)
	} else if err != nil {
		t.Fatal(err)
	}
	client, err := net.Dial("udp", server.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	b := make([]byte, 16)
	for i := range 5 {
		if _, err := client.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		if n, err := server.Read(b); err != nil || n != 1 || b[0] != byte(i) {
			t.Fatalf("datagram %d: %d bytes, %v", i, n, err)
		}
	}
	if c := g.Counts(); c.Passed != 5 || c.Refused != 0 || c.Tiers["fresh"].Passed+c.Tiers["seen"].Passed == 0 {
		t.Errorf("counted %+v", c)
	}
	if _, err := guard.Attach(server, 100); !errors.Is(err, guard.ErrOccupied) {
		t.Errorf("a second guard: %v, want ErrOccupied", err)
	}
	g.Close()
	if err := g.SetLimits(guard.Limits{Total: 5}); !errors.Is(err, guard.ErrClosed) {
		t.Errorf("SetLimits after Close: %v, want ErrClosed", err)
	}
}
