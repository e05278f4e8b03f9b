// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/filtertest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

// location is a position for a program in the host.
type location struct {
	name  string
	hook  compile.Hook
	start compile.Start
	takes func(p *packet) bool // whether the packet reaches it
	sees  func(p *packet) *expr.Packet
	// attach sends every packet of the location through the program, until detach.
	attach func(w *world, pins string, p *ebpf.Program) (detach func(), err error)
}

func all(*packet) bool       { return true }
func inStack(p *packet) bool { return p.stack }

func (p *packet) goesTo(t target) bool { return p.to == t }

// locations returns all locations, two of XDP and two of sockets. Hooks before routing run first in Linux,
// and see fragments before reassembly.
func locations() []*location {
	return []*location{
		{name: "xdp", hook: compile.XDP, takes: all, sees: (*packet).link, attach: links(func(w *world) []kernel.Attachment {
			return []kernel.Attachment{kernel.XDP{Ifindex: w.ifindex, Device: device}}
		})},
		{name: "xdp-generic", hook: compile.XDP, takes: all, sees: (*packet).link, attach: links(func(w *world) []kernel.Attachment {
			return []kernel.Attachment{kernel.XDP{Ifindex: w.ifindex, Device: device, Generic: true}}
		})},
		{name: "tcx", hook: compile.TC, takes: all, sees: (*packet).link, attach: links(func(w *world) []kernel.Attachment {
			return []kernel.Attachment{kernel.TCX{Ifindex: w.ifindex, Device: device}}
		})},
		{name: "netfilter", hook: compile.Netfilter, takes: inStack, sees: (*packet).network, attach: links(func(*world) []kernel.Attachment {
			return netfilter(kernel.Prerouting, -300)
		})},
		{name: "nft", hook: compile.Socket, start: compile.IPHeader, takes: inStack, sees: (*packet).network, attach: attachNFT},
		{name: "socket", hook: compile.Socket, start: compile.Transport, sees: (*packet).network, attach: sockets(openTransport),
			takes: func(p *packet) bool { return p.goesTo(transport) }},
		{name: "socket-raw", hook: compile.Socket, start: compile.IPHeader, sees: (*packet).network, attach: sockets(openRawIPv4),
			takes: func(p *packet) bool { return p.goesTo(rawIPv4) }},
	}
}

func netfilter(at kernel.InetHook, priority int32) []kernel.Attachment {
	return []kernel.Attachment{kernel.Netfilter{Family: unix.NFPROTO_IPV4, Hook: at, Priority: priority},
		kernel.Netfilter{Family: unix.NFPROTO_IPV6, Hook: at, Priority: priority}}
}

// links attaches to hooks with links.
func links(of func(*world) []kernel.Attachment) func(*world, string, *ebpf.Program) (func(), error) {
	return func(w *world, _ string, p *ebpf.Program) (func(), error) { return attachLinks(w.host, p, of(w)...) }
}

func attachLinks(ns *netns.Handle, p *ebpf.Program, to ...kernel.Attachment) (func(), error) {
	var held []kernel.Link
	detach := func() {
		for _, l := range held {
			l.Close()
		}
	}
	err := ns.Do(func() error {
		for _, a := range to {
			l, err := a.Attach(p)
			if err != nil {
				return err
			}
			held = append(held, l)
		}
		return nil
	})
	if err != nil {
		detach()
		return nil, err
	}
	return detach, nil
}

func attachNFT(w *world, pins string, p *ebpf.Program) (func(), error) {
	return nftAsks(w.host, pins, hook.NFT{Table: "weir_lab", Hook: kernel.Prerouting, Priority: -200}, p)
}

// nftAsks adds a rule to nftables with a call of a program.
func nftAsks(ns *netns.Handle, pins string, at hook.NFT, p *ebpf.Program) (func(), error) {
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(pins, "asked")
	c, err := p.Clone() // pinning would tie the program to the path
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.Pin(path); err != nil {
		return nil, fmt.Errorf("pin the program for nftables: %w", err)
	}
	defer os.Remove(path)
	if err := ns.Do(func() error { return at.Attach(path, "the lab") }); err != nil {
		return nil, err
	}
	return func() { _ = ns.Do(at.Detach) }, nil // its namespace is removed, too
}

// sockets attaches to sockets it opens.
func sockets(open func(*world) ([]*net.UDPConn, []*net.IPConn, error)) func(*world, string, *ebpf.Program) (func(), error) {
	return func(w *world, _ string, p *ebpf.Program) (func(), error) {
		udp, raw, err := open(w)
		closeAll := func() {
			for _, c := range udp {
				c.Close()
			}
			for _, c := range raw {
				c.Close()
			}
		}
		for _, c := range udp {
			err = errors.Join(err, onSocket(c, func(fd int) error { return (&hook.SocketFilter{FD: fd, Name: "of UDP"}).Attach(p) }))
		}
		for _, c := range raw {
			err = errors.Join(err, onSocket(c, func(fd int) error { return (&hook.SocketFilter{FD: fd, Name: "raw"}).Attach(p) }))
		}
		if err != nil {
			closeAll()
			return nil, err
		}
		return closeAll, nil
	}
}

// openTransport opens a UDP socket of both families on each port, and raw IPv6 sockets for the other
// protocols.
func openTransport(w *world) (udp []*net.UDPConn, raw []*net.IPConn, err error) {
	err = w.host.Do(func() error {
		for _, port := range ports {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv6Unspecified(), port)))
			if err != nil {
				return err
			}
			udp = append(udp, c)
		}
		for _, proto := range []string{"ip6:tcp", "ip6:ipv6-icmp"} {
			c, err := net.ListenIP(proto, nil)
			if err != nil {
				return err
			}
			raw = append(raw, c)
		}
		return nil
	})
	return udp, raw, err
}

func openRawIPv4(w *world) (_ []*net.UDPConn, raw []*net.IPConn, err error) {
	err = w.host.Do(func() error {
		for _, proto := range []string{"ip4:tcp", "ip4:icmp"} {
			c, err := net.ListenIP(proto, nil)
			if err != nil {
				return err
			}
			raw = append(raw, c)
		}
		return nil
	})
	return nil, raw, err
}

// patience is the longest time of a packet to a hook. It takes microseconds, but the machine may be busy.
// After it a waiter polls once more, because it may have stalled itself.
const patience = time.Second

// counter reads the packets counted by a program's rules.
type counter struct {
	counts *ebpf.Map
	n      int
}

func (c counter) read() ([]uint64, error) {
	all, err := filtertest.ReadCounts(c.counts, c.n)
	out := make([]uint64, len(all))
	for i, v := range all {
		out[i] = v.Packets
	}
	return out, err
}

// load compiles rules and loads the program.
func load(rules []compile.Rule, o compile.Options) (*ebpf.Program, counter, func(), error) {
	p, err := compile.Compile(rules, o)
	if err != nil {
		return nil, counter{}, nil, err
	}
	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
	if err != nil {
		return nil, counter{}, nil, err
	}
	return c.Programs[compile.ProgramName], counter{c.Maps[compile.CountsName], len(rules) + 1}, c.Close, nil
}
