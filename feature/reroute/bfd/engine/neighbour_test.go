// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/nstest"
)

// Without forwarding on the device, the engine tells the programs a neighbour's link address and its changes.
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

// A failed resolution is reported with its reason, but not every second.
func TestLookupWarnings(t *testing.T) {
	full := lookupError(&netlink.Neigh{IP: net.IPv4(10, 0, 0, 2), Family: unix.AF_INET}, unix.ENOBUFS)
	if lookupError(nil, nil) != nil || !errors.Is(full, unix.ENOBUFS) || !strings.Contains(full.Error(), "neighbour 10.0.0.2") || !strings.Contains(full.Error(), "net.ipv4.neigh.default.gc_thresh3") {
		t.Errorf("the error is %v", full)
	}
	var r repeated
	now := time.Unix(1000, 0)
	for i, c := range []struct {
		err  error
		at   time.Duration
		news bool
	}{{nil, 0, false}, {full, 0, true}, {full, time.Second, false}, {unix.EPERM, 2 * time.Second, true}, {full, 3 * time.Second, true}, {nil, 4 * time.Second, false},
		{full, 5 * time.Second, true}, {full, 5*time.Second + warnAgain, true}} {
		if got := r.news(c.err, now.Add(c.at)); got != c.news {
			t.Errorf("warning %d: %t", i, got)
		}
	}
}
