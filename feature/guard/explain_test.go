// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// What Explain says of a datagram is what becomes of real ones: before a flood, in it, and after it, where a guard gives a
// heavy source what is free at random. Asking charges nothing.
func TestExplainIsWhatHappens(t *testing.T) {
	w := newWorld(t, kernel.CgroupIngress)
	w.apply(guarded(t, "dns", Options{Limit: 20}, "udp :5300"))
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for _, addr := range []string{"127.0.0.1:5300", "[::1]:5300"} {
		s := listenUDP(t, addr)
		to := netip.MustParseAddrPort(addr)
		p := feature.Packet{Proto: "udp", From: netip.AddrPortFrom(to.Addr(), 40000), To: to, Inode: ns.Inode(), Interface: "lo"}
		if addr == "127.0.0.1:5300" { // the other one's source is of a guard that has seen a flood
			before := w.state("dns")
			if chance := chanceOf(t, w, p); chance != 1 {
				t.Errorf("before the flood: passes with a chance of %v", chance)
			}
			if after := w.state("dns"); after.Passed != before.Passed || after.Refused != before.Refused {
				t.Errorf("asking has charged: %d and %d, then %d and %d", before.Passed, before.Refused, after.Passed, after.Refused)
			}
			if came := sendOne(t, s); !came {
				t.Error("before the flood: it passes, but does not come")
			}
		}

		end := make(chan struct{}, 1)
		flooded := make(chan int, 1)
		go func() {
			n := 0
			err := ns.Do(func() error { // goroutines are elsewhere
				for ; len(end) == 0; n += 20 {
					flood(t, s.LocalAddr(), 20)
					time.Sleep(5 * time.Millisecond)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			flooded <- n
		}()
		time.Sleep(500 * time.Millisecond)
		most := 0.0
		for range 4 {
			most = max(most, chanceOf(t, w, p))
		}
		end <- struct{}{}
		if sent, came := <-flooded, s.received(t); most > 0.2 || float64(came) > 0.2*float64(sent) {
			t.Errorf("%s, in the flood: a chance of up to %v; %d of %d came", addr, most, came, sent)
		}

		sum, came := 0.0, 0
		const n = 12
		for range n {
			chance := chanceOf(t, w, p)
			if chance == 0 || chance == 1 {
				t.Errorf("%s, after the flood: a chance of %v", addr, chance)
			}
			sum += chance
			if sendOne(t, s) {
				came++
			}
		}
		// The deviation of 12 such draws is 1.7 at most: 7 is exceeded once in some ten thousand runs.
		if math.Abs(sum-float64(came)) > 7 {
			t.Errorf("%s, after the flood: %d of %d came, and %.1f were foretold", addr, came, n, sum)
		}
		s.Close()
	}
	w.apply(guarded(t, "dns", Options{Limit: 20, DryRun: true}, "udp :5300"))
	p := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("127.0.0.1:9"), To: netip.MustParseAddrPort("127.0.0.1:5300"), Inode: ns.Inode(), Interface: "lo"}
	if s := explain(t, w, p); !strings.Contains(s[0].Text, "would be refused with a chance of") || !strings.Contains(s[0].Text, "passes since it is a dry run") {
		t.Errorf("dry run: %+v", s)
	}
}

// sendOne sends a datagram and says whether it came.
func sendOne(t *testing.T, s udpServer) bool {
	t.Helper()
	flood(t, s.LocalAddr(), 1)
	return s.received(t) == 1
}

// chanceOf is the chance that a packet passes, as explained.
func chanceOf(t *testing.T, w *world, p feature.Packet) float64 {
	t.Helper()
	s := explain(t, w, p)[0]
	_, says, _ := strings.Cut(s.Text, "at this moment a packet from "+p.From.Addr().String()+" ")
	percent, chance := 0, 1.0
	switch _, err := fmt.Sscanf(says, "passes with a chance of %d", &percent); {
	case err == nil:
		chance = float64(percent) / 100
	case strings.HasPrefix(says, "is refused"):
		chance = 0
	case !strings.HasPrefix(says, "passes"):
		t.Fatalf("said %q", s.Text)
	}
	if s.Warning != (chance < 1) || s.Stage != feature.StageSocket {
		t.Errorf("said %+v", s)
	}
	return chance
}

func explain(t *testing.T, w *world, p feature.Packet) []feature.Sight {
	t.Helper()
	s, err := Feature{}.Explain(t.Context(), w.root, p)
	if err != nil || len(s) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	return s
}

// Datagrams that a guard is not for are none of its business.
func TestExplainElsewhere(t *testing.T) {
	w := newWorld(t, kernel.CgroupIngress)
	w.apply(guarded(t, "dns", Options{Limit: 20}, "udp 127.0.0.0/8:5300"))
	inode := w.state("dns").pub.Inode
	for _, c := range []struct {
		proto, to string
		inode     uint64
		want      int
	}{{"udp", "127.0.0.1:5300", inode, 1}, {"udp", "127.0.0.1:5301", inode, 0}, {"udp", "10.0.0.1:5300", inode, 0},
		{"tcp", "127.0.0.1:5300", inode, 0}, {"udp", "127.0.0.1:5300", inode + 1, 0}} {
		p := feature.Packet{Proto: c.proto, From: netip.MustParseAddrPort("127.0.0.1:9"), To: netip.MustParseAddrPort(c.to), Inode: c.inode, Interface: "lo"}
		if s, err := (Feature{}).Explain(t.Context(), w.root, p); err != nil || len(s) != c.want {
			t.Errorf("%+v: %+v, %v", c, s, err)
		}
	}
}
