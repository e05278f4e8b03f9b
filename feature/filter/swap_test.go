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

// Rules change under a flood, and each packet meets exactly one set of rules. Both sets drop port
// 5000. Each set drops one of ports 5001 and 5002 and counts the other. No packet to 5000 may
// arrive. The counts over all changes must equal the packets sent: a packet in no set, or in two,
// would show.
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
			t.Errorf("got only %d packets and %d changes", total, swaps)
		}
		// Wait for packets in transit: all have arrived once all are counted.
		counted := func() (n uint64) {
			for _, r := range w.one().Rules {
				n += r.Packets
			}
			return n
		}
		nstest.Eventually(t, func() error {
			if n := counted(); n < total-lost {
				return fmt.Errorf("counted %d packets, want %d", n, total-lost)
			}
			return nil
		})
		never.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if n, err := never.Read(make([]byte, 64)); err == nil {
			t.Errorf("a packet of %d bytes arrived, but every set of rules drops it", n)
		}
		for _, r := range w.one().Rules {
			if port := r.Name; lost == 0 && r.Packets != sent[port] {
				t.Errorf("rule %s counted %d packets, want %d", r.Name, r.Packets, sent[port])
			}
		}
		if n := counted(); n != total-lost {
			t.Errorf("the rules counted %d of %d packets (%d lost before the filter)", n, total, lost)
		}
		t.Logf("%d changes, %d packets, %d lost before the filter", swaps, total, lost)
	})
}

// flood sends to several ports of B in turn.
type flood struct {
	end  atomic.Bool
	done chan map[string]uint64
}

func startFlood(t testing.TB, w *world, ports []uint16) *flood {
	t.Helper()
	from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(w.A4, 0))
	for _, port := range ports[1:] {
		nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, port)) // or B would answer with ICMP errors
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
				time.Sleep(50 * time.Microsecond) // leave CPU time to the changes
			}
		}
		f.done <- sent
	}()
	t.Cleanup(func() { f.end.Store(true) })
	return f
}

// stop ends the flood and returns the number of packets sent to each port.
func (f *flood) stop() map[string]uint64 {
	f.end.Store(true)
	sent := <-f.done
	f.done <- sent
	time.Sleep(5 * time.Millisecond) // packets in transit
	return sent
}

// silenceA disables IPv6 in A and so its own multicast and router messages. The wire counts lost
// packets without telling them apart.
func (w *world) silenceA() {
	w.t.Helper()
	err := w.A.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+nstest.WireDevice+"/disable_ipv6", []byte("1"), 0)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	kernel.WaitForPrograms() // wait for packets on their way to the wire
}

// lostOnTheWay returns the packets lost by the wire before B's device.
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
