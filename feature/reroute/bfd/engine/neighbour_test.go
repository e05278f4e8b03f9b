// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/nstest"
)

// Where the device does not forward, programs are told of a neighbour's link address, and of another one that it has later.
func TestNeighbourMoves(t *testing.T) {
	s := newSide(t)
	for i, peer := range []string{"10.9.0.77", "fd09::77"} {
		local := []string{"10.9.0.1", "fd09::1"}[i]
		s.put(s.session(i+1, local, peer))
		for _, mac := range []net.HardwareAddr{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}} {
			err := s.here.Do(func() error {
				return netlink.NeighSet(&netlink.Neigh{LinkIndex: nstest.Ifindex(t, s.here, "w0"), IP: net.ParseIP(peer), HardwareAddr: mac, State: netlink.NUD_PERMANENT})
			})
			if err != nil {
				t.Fatal(err)
			}
			nstest.Until(s, "programs send to "+mac.String(), func() bool {
				s.e.mu.Lock()
				defer s.e.mu.Unlock()
				if err := s.e.resolve(); err != nil {
					t.Fatal(err)
				}
				found := false
				if err := s.e.each(func(place uint32, _ *bpf.BfdBfdSetup) {
					hop := make([]byte, s.e.tables.hops.ValueSize())
					if err := s.e.tables.hops.Lookup(place, &hop); err != nil {
						t.Fatal(err)
					}
					found = found || net.HardwareAddr(hop[hopAddresses:hopAddresses+6]).String() == mac.String()
				}); err != nil {
					t.Fatal(err)
				}
				return found
			})
		}
	}
}
