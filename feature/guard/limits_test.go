// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/nstest"
)

// A limit is lowered during a flood below the old limit. The flood's sources have reservations by
// then. These must not displace the clients: for many small sources, few large ones, or many with
// one dominant source.
func TestLimitLoweredInFlood(t *testing.T) {
	nstest.NeedRoot(t)
	for _, c := range []struct{ sources, largest int }{{3000, 0}, {50, 0}, {3000, 8}} {
		t.Run(fmt.Sprintf("%d and one of %d", c.sources, c.largest), func(t *testing.T) { lowerInFlood(t, c.sources, c.largest) })
	}
}

// lowerInFlood sends 50 packets in 10 ms from random sources, largest of them from one source.
func lowerInFlood(t *testing.T, sources, largest int) {
	to := netip.MustParseAddrPort("192.0.2.1:5300")
	s, err := Simulate(Cgroup, Limits{Total: 20_000}, to, false)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Seed(1, 2)
	random := rand.New(rand.NewPCG(1, 2))
	send := func(at time.Duration, from string, port int) bool {
		frame, err := feature.Packet{Proto: "udp", From: netip.AddrPortFrom(netip.MustParseAddr(from), uint16(port)), To: to}.Frame()
		if err != nil {
			t.Fatal(err)
		}
		passes, err := s.Passes(uint64(time.Hour+at), frame)
		if err != nil {
			t.Fatal(err)
		}
		return passes
	}
	flood := make([]string, sources)
	for i := range flood {
		flood[i] = netip.AddrFrom4([4]byte{172, 16, byte(random.IntN(256)), byte(random.IntN(256))}).String()
	}
	const begin, lowered, settled, end = 10 * time.Second, 35 * time.Second, 45 * time.Second, 60 * time.Second
	sent, passed, changed := 0, 0, false
	// A step of 10 ms has 50 flood packets. In every second step, two clients send a packet each.
	for at := time.Duration(0); at < end; at += 10 * time.Millisecond {
		if at >= lowered && !changed {
			s.setLimits(Limits{Total: 1000})
			if reserved := s.state.Total.Reserved; reserved > s.state.Limits().PerEpoch/4*3 || reserved == 0 {
				t.Errorf("lowered to %d packets an epoch: %d packets are reserved for %d sources", s.state.Limits().PerEpoch, reserved, s.state.Total.Holders)
			}
			changed = true
		}
		for n := range 50 {
			if at >= begin {
				from := flood[random.IntN(len(flood))]
				if n < largest {
					from = flood[0]
				}
				send(at+time.Duration(n)*200*time.Microsecond, from, 1024+random.IntN(60000))
			}
			if n%25 == 12 && at/(10*time.Millisecond)%2 == 0 {
				client := []string{"198.51.100.7", "203.0.113.9"}[n/25]
				if ok := send(at+time.Duration(n)*200*time.Microsecond+1, client, 40000); at >= settled {
					sent++
					if ok {
						passed++
					}
				}
			}
		}
	}
	if passed < sent*95/100 {
		t.Errorf("%d of %d of the clients' packets passed, want 95 %%; reserved %d of %d an epoch", passed, sent, s.state.Total.Reserved, s.state.Limits().PerEpoch)
	}
}
