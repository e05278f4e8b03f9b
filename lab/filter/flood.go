// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/kernel"
)

// flood sends to the swaps' ports in turn, over IPv4 and IPv6.
type flood struct {
	w     *world
	from  []*net.UDPConn
	lost  uint64  // wire losses from before
	gate  counter // of packets sent to each port
	close func()
	end   atomic.Bool
	ended chan struct{}
	tried atomic.Uint64 // packets
}

func startFlood(w *world) (*flood, error) {
	f := &flood{w: w, close: func() {}, ended: make(chan struct{})}
	err := w.sender.Do(func() error {
		for _, network := range []string{"udp4", "udp6"} {
			c, err := net.ListenUDP(network, nil)
			if err != nil {
				return err
			}
			f.from = append(f.from, c)
		}
		return nil
	})
	if err == nil {
		err = f.shut()
	}
	if err == nil {
		f.lost, err = w.lostOnTheWay()
	}
	if err != nil {
		f.closeAll()
		return nil, err
	}
	go f.send()
	return f, nil
}

// shut drops all packets of the sender except the flood, and counts the flood there. The wire counts lost
// packets without identifying them, and a host also sends on its own (multicast reports, router
// solicitations).
func (f *flood) shut() error {
	var rules []compile.Rule
	for _, port := range swapPorts {
		rules = append(rules, compile.Rule{Name: swapName(port), Match: expr.MustParse(swapMatch(port)), Action: compile.Pass})
	}
	prog, gate, unload, err := load(rules, compile.Options{Hook: compile.TC, Default: compile.Drop})
	if err != nil {
		return err
	}
	f.gate, f.close = gate, unload
	detach, err := attachLinks(f.w.sender, prog, kernel.TCX{Ifindex: f.w.sends, Device: device, Egress: true})
	if err != nil {
		return err
	}
	f.close = func() { detach(); unload() }
	kernel.WaitForPrograms() // also waits for packets counted here and not on the wire yet
	return nil
}

func (f *flood) closeAll() {
	f.close()
	for _, c := range f.from {
		c.Close()
	}
}

func (f *flood) send() {
	defer close(f.ended)
	to := []netip.Addr{netip.AddrFrom4(host4), netip.AddrFrom16(host6)}
	for n := 0; !f.end.Load(); n++ {
		f.tried.Add(1)
		// An unsent packet is not counted here.
		_, _ = f.from[n%2].WriteToUDPAddrPort([]byte("flood"), netip.AddrPortFrom(to[n%2], swapPorts[n%len(swapPorts)]))
		if n%64 == 0 {
			time.Sleep(50 * time.Microsecond) // the changes need CPU time as well
		}
	}
}

// stop ends the flood. It returns the number of packets sent to each port, and the number lost by the wire.
func (f *flood) stop() (sent map[uint16]uint64, lost uint64, err error) {
	f.end.Store(true)
	<-f.ended
	defer f.closeAll()
	lost, err = f.w.lostOnTheWay()
	if err != nil {
		return nil, 0, err
	}
	out, err := f.gate.read()
	if err != nil {
		return nil, 0, err
	}
	sent = map[uint16]uint64{}
	for i, port := range swapPorts {
		sent[port] = out[i]
	}
	return sent, lost - f.lost, nil
}

// lostOnTheWay returns the packets lost on the wire before the host's device.
func (w *world) lostOnTheWay() (n uint64, err error) {
	err = w.sender.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			n = l.Attrs().Statistics.TxDropped
		}
		return err
	})
	return n, err
}
