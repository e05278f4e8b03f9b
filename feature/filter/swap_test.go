// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Rules change under a flood: each packet meets one whole set. Both sets drop port
// 5000; of ports 5001 and 5002 each set drops one and counts the other. So no
// packet to 5000 may ever arrive, and what the rules count, over all changes, is
// exactly what was sent: a packet that met no set, or two, would show.
func TestSwapUnderLoad(t *testing.T) {
	ports := []uint16{5000, 5001, 5002}
	set := func(w *world, h Hook, dropped int) Filter {
		f := w.filter(h)
		for _, port := range ports {
			r := drops(int(port))
			if int(port) != 5000 && int(port) != dropped {
				r.Action = Count
			}
			f.Rules = append(f.Rules, r)
		}
		return f
	}
	eachHook(t, func(t *testing.T, h Hook) {
		w := newWorld(t)
		w.apply(set(w, h, 5001))
		w.silenceA()
		lostBefore := w.lostOnTheWay()
		never := nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, 5000))
		f := startFlood(t, w, ports)
		swaps := 0
		for end := time.Now().Add(700 * time.Millisecond); time.Now().Before(end) || swaps < 4; swaps++ {
			w.apply(set(w, h, 5001+(swaps+1)%2))
		}
		sent := f.stop()
		var total, lost uint64
		for _, n := range sent {
			total += n
		}
		lost = w.lostOnTheWay() - lostBefore
		if total < 1000 || swaps < 4 {
			t.Errorf("only %d packets and %d changes", total, swaps)
		}
		// What is on its way has the time it needs: it is there when all is counted.
		counted := func() (n uint64) {
			for _, r := range w.one().Rules {
				n += r.Packets
			}
			return n
		}
		nstest.Eventually(t, func() error {
			if n := counted(); n < total-lost {
				return fmt.Errorf("%d packets of %d are counted", n, total-lost)
			}
			return nil
		})
		never.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if n, err := never.Read(make([]byte, 64)); err == nil {
			t.Errorf("a packet of %d bytes that every set drops has arrived", n)
		}
		for _, r := range w.one().Rules {
			if port := r.Name; lost == 0 && r.Packets != sent[port] {
				t.Errorf("rule %s has counted %d of %d packets", r.Name, r.Packets, sent[port])
			}
		}
		if n := counted(); n != total-lost {
			t.Errorf("rules have counted %d of %d packets, of which %d were lost before", n, total, lost)
		}
		t.Logf("%d changes, %d packets, %d lost before the filter", swaps, total, lost)
	})
}

// flood sends to some ports of B in turn.
type flood struct {
	end  atomic.Bool
	done chan map[string]uint64
}

func startFlood(t testing.TB, w *world, ports []uint16) *flood {
	t.Helper()
	from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(w.A4, 0))
	for _, port := range ports[1:] {
		nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, port)) // or B would answer each
	}
	f := &flood{done: make(chan map[string]uint64, 1)}
	go func() {
		sent := map[string]uint64{}
		for n := 0; !f.end.Load(); n++ {
			port := ports[n%len(ports)]
			if _, err := from.WriteToUDPAddrPort([]byte("flood"), netip.AddrPortFrom(w.B4, port)); err == nil {
				sent[fmt.Sprintf("p%d", port)]++
			}
			if n%64 == 0 {
				time.Sleep(50 * time.Microsecond) // the changes need a CPU as well
			}
		}
		f.done <- sent
	}()
	t.Cleanup(func() { f.end.Store(true) })
	return f
}

// stop ends the flood and says how much was sent to whom.
func (f *flood) stop() map[string]uint64 {
	f.end.Store(true)
	sent := <-f.done
	f.done <- sent
	time.Sleep(5 * time.Millisecond) // what is on its way
	return sent
}

// silenceA has A say nothing by itself, as IPv6 does of groups and routers: the wire
// tells how many packets it has lost, and not which.
func (w *world) silenceA() {
	w.t.Helper()
	err := w.A.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+nstest.WireDevice+"/disable_ipv6", []byte("1"), 0)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	kernel.WaitForPrograms() // as long as a packet takes to the wire
}

// lostOnTheWay is what the wire lost before B's device.
func (w *world) lostOnTheWay() (n uint64) {
	w.t.Helper()
	err := w.A.Do(func() error {
		l, err := netlink.LinkByName(nstest.WireDevice)
		if err == nil {
			n = l.Attrs().Statistics.TxDropped
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}
