// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"strings"
	gosync "sync" // the package has a sync of its own
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel/probe"
)

// Explain predicts the fate of real datagrams: before, during and after a flood. After it, the
// guard gives free capacity to a heavy source at random. Explaining charges nothing.
func TestExplainIsWhatHappens(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
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
		if addr == "127.0.0.1:5300" { // the other address's source belongs to a guard with a past flood
			before := w.state("dns")
			if chance := chanceOf(t, w, p); chance != 1 {
				t.Errorf("before the flood: passes with a chance of %v", chance)
			}
			if after := w.state("dns"); after.Passed != before.Passed || after.Refused != before.Refused {
				t.Errorf("an explanation was charged: %d and %d, then %d and %d", before.Passed, before.Refused, after.Passed, after.Refused)
			}
			flood(t, s.LocalAddr(), 1)
			if s.receivedOf(t, 1) != 1 {
				t.Error("before the flood: the packet should pass, but did not arrive")
			}
		}

		f := startFlood(t, ns, s)
		time.Sleep(500 * time.Millisecond)
		foretold := 0.0 // on average
		const asks = 10
		for asked, began := 0, time.Now(); asked < asks; {
			// A stalled machine sends no flood. A flood means fifty times the limit without a
			// pause, because a pause frees capacity for a packet or two. After two minutes, a busy
			// host is tested anyway.
			f.look()
			time.Sleep(50 * time.Millisecond)
			chance := chanceOf(t, w, p)
			rate, pause := f.look()
			if rate >= 50*20 && (pause < 30*time.Millisecond || time.Since(began) > 2*time.Minute) {
				foretold += chance / asks
				asked++
			} else if time.Since(began) > 4*time.Minute {
				t.Fatalf("there is no flood: %.0f packets a second", rate)
			}
		}
		over := time.Now()
		all, got := f.stop(), s.received(t)
		t.Logf("%s, in the flood: a mean chance of %.3f; %d of %d arrived", addr, foretold, got, all)
		if foretold > 0.1 || float64(got) > 0.1*float64(all) {
			t.Error("the predicted or the actual share is above a tenth")
		}

		sum, came := 0.0, 0
		const n = 12
		for range n {
			chance := chanceOf(t, w, p)
			if time.Since(over) > 2*time.Second {
				break // after an epoch of 2.1 s without a flood, the source is no longer heavy
			}
			if chance == 0 || chance == 1 {
				t.Errorf("%s, after the flood: a chance of %v", addr, chance)
			}
			sum += chance
			if sendOne(t, s) {
				came++
			}
		}
		// The standard deviation of 12 such draws is at most 1.7: 7 is exceeded once in some ten
		// thousand runs.
		if math.Abs(sum-float64(came)) > 7 {
			t.Errorf("%s, after the flood: %d of %d arrived, predicted %.1f", addr, came, n, sum)
		}
		s.Close()
	}
	w.apply(guarded(t, "dns", Options{Limit: 20, DryRun: true}, "udp :5300"))
	// The source behaved in the meantime, so flood again.
	s := listenUDP(t, "127.0.0.1:5300")
	flood(t, s.LocalAddr(), 200)
	s.Close()
	p := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("127.0.0.1:9"), To: netip.MustParseAddrPort("127.0.0.1:5300"), Inode: ns.Inode(), Interface: "lo"}
	if s := explain(t, w, p); !strings.Contains(s[0].Text, "would be refused with a chance of") || !strings.Contains(s[0].Text, "but passes in a dry run") {
		t.Errorf("dry run: %+v", s)
	}
}

// steadyFlood sends until it is stopped.
type steadyFlood struct {
	t    *testing.T
	to   net.Addr
	end  atomic.Bool
	done chan struct{}

	mu    gosync.Mutex
	sent  int // packets since the last look
	all   int
	since time.Time     // of the last look
	last  time.Time     // time of the last send
	pause time.Duration // longest pause between sends since the last look
}

func startFlood(t *testing.T, ns *netns.Handle, s udpServer) *steadyFlood {
	f := &steadyFlood{t: t, to: s.LocalAddr(), done: make(chan struct{}), since: time.Now(), last: time.Now()}
	go func() {
		defer close(f.done)
		if err := ns.Do(f.send); err != nil { // goroutines run in another namespace
			t.Error(err)
		}
	}()
	t.Cleanup(func() { f.stop() })
	return f
}

func (f *steadyFlood) send() error {
	for pace := time.NewTicker(5 * time.Millisecond); !f.end.Load(); <-pace.C {
		flood(f.t, f.to, 20)
		f.mu.Lock()
		f.sent, f.all = f.sent+20, f.all+20
		f.pause, f.last = max(f.pause, time.Since(f.last)), time.Now()
		f.mu.Unlock()
	}
	return nil
}

// look returns the packets per second since the last call, and the longest pause, including the
// present one.
func (f *steadyFlood) look() (rate float64, pause time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	rate, pause = float64(f.sent)/now.Sub(f.since).Seconds(), max(f.pause, now.Sub(f.last))
	f.sent, f.since, f.pause = 0, now, 0
	return rate, pause
}

// stop ends the flood and returns the number of packets sent.
func (f *steadyFlood) stop() int {
	f.end.Store(true)
	<-f.done
	return f.all
}

// sendOne sends a datagram and reports its arrival.
func sendOne(t *testing.T, s udpServer) bool {
	t.Helper()
	flood(t, s.LocalAddr(), 1)
	return s.received(t) == 1
}

// chanceOf returns the probability of passing, as explained.
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

func explain(t *testing.T, w *world, p feature.Packet) []feature.Verdict {
	t.Helper()
	s, err := Feature{}.Explain(t.Context(), w.root, p)
	if err != nil || len(s) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	return s
}

// Explain returns no verdict of a guard for unguarded datagrams.
func TestExplainElsewhere(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	w.apply(guarded(t, "dns", Options{Limit: 20}, "udp 127.0.0.0/8:5300"))
	inode := w.state("dns").rec.Meta.Inode
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
