// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// newOf returns a flow of the first service hashed to a backend.
func (s *scene) newOf(t *testing.T, number move.Backend) Key {
	t.Helper()
	for port := uint16(20000); port < 30000; port++ {
		k := Key{Client: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.2"), port)}
		var found uint16
		if err := s.f.maps.LbRing.Lookup(uint32(k.Bucket()), &found); err != nil {
			t.Fatal(err)
		}
		if move.Backend(found) == number {
			return k
		}
	}
	t.Fatalf("the hash leads none of 10,000 ports to backend %d", number)
	return Key{}
}

// TestReopenedRefused checks that a client reconnecting from the same port is served by another
// backend. The former one is unwell, has no server and resets the SYN.
func TestReopenedRefused(t *testing.T) {
	for name, c := range map[string]struct {
		flags uint32 // of the earlier flow; 0: as set by the data path
		dials int
	}{"the first SYN was reset": {0, 1}, "a session was reset": {flow.WasReset | flow.ResetOut, 2}} {
		t.Run(name, func(t *testing.T) {
			const owner, other = 1, 2
			sc := newScene(t)
			serveAt(t, sc.hosts[other-1], other, service4)
			k := sc.newOf(t, owner)
			refused := func() {
				t.Helper()
				if err := <-sc.begin(t, k); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Fatalf("%v: want it refused by host %d", err, owner)
				}
				change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(2*time.Second) })
			}
			refused()
			if c.flags != 0 {
				change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Flags = c.flags })
			}
			sc.unwell(t, owner)
			for range c.dials - 1 {
				refused()
			}
			if err := <-sc.begin(t, k); err != nil {
				t.Error(err)
			}
			if fl, err := sc.f.Flow(k); err != nil || fl.Owner != other || fl.Epoch != 1 {
				t.Errorf("%+v, %v: want backend %d's in epoch 1", fl, err, other)
			}
		})
	}
}
