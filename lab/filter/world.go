// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// device is the name of the host's interface, and of the sender's.
const device = "eth0"

// world is a cable from a sender to a host with a filtered end.
type world struct {
	sender, host *netns.Handle
	hostName     string
	ifindex      int    // of the host's end
	sends        int    // of the sender's end
	macs         []byte // the host's and the sender's: the begin of a frame
	out          int    // a packet socket of the sender
}

// newWorld creates a world. The sender has addresses only if talks is set, to send from sockets. A sender
// without addresses answers nothing, so the host receives only the sent packets.
func newWorld(e *lab.Env, name string, talks bool) (*world, error) {
	w := &world{out: -1}
	var err error
	if w.sender, _, err = e.Namespace(name + "-a"); err != nil {
		return nil, err
	}
	if w.host, w.hostName, err = e.Namespace(name + "-b"); err != nil {
		return nil, err
	}
	for _, ns := range []*netns.Handle{w.sender, w.host} {
		// Packets from sources without a route must not be dropped; only the replies to them are not sent.
		err = errors.Join(err, topo.Sysctl(ns, "net.ipv4.conf.all.rp_filter", "0"), topo.Sysctl(ns, "net.ipv4.conf.default.rp_filter", "0"),
			topo.Addresses(ns))
	}
	if err != nil {
		return nil, err
	}
	a := topo.End{NS: w.sender, Name: device}
	if talks {
		a.Addrs = addresses(sources4[0], sources6[0])
	}
	if err := topo.Cable(a, topo.End{NS: w.host, Name: device, Addrs: addresses(host4, host6)}); err != nil {
		return nil, err
	}
	if err := w.open(talks); err != nil {
		return nil, err
	}
	e.OnClose(func() { unix.Close(w.out) })
	return w, nil
}

func addresses(v4 [4]byte, v6 [16]byte) []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4(v4), 24), netip.PrefixFrom(netip.AddrFrom16(v6), 64)}
}

func (w *world) open(talks bool) error {
	var mac, own net.HardwareAddr
	err := w.host.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		w.ifindex, mac = l.Attrs().Index, l.Attrs().HardwareAddr
		return nil
	})
	if err != nil {
		return err
	}
	err = w.sender.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		w.sends, own = l.Attrs().Index, l.Attrs().HardwareAddr
		// Protocol 0: it receives nothing.
		if w.out, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		return unix.Bind(w.out, &unix.SockaddrLinklayer{Ifindex: w.sends})
	})
	if err != nil {
		return err
	}
	w.macs = append(append(w.macs, mac...), own...)
	// The host would report to itself by ICMP its failure to answer.
	if err := neighbours(w.host, w.ifindex, own, addresses(sources4[0], sources6[0])); err != nil || !talks {
		return err
	}
	// The first packets of a flood would wait for the host's address, and the last of these would be lost.
	return neighbours(w.sender, w.sends, mac, addresses(host4, host6))
}

// neighbours adds permanent neighbour entries for the addresses to a namespace.
func neighbours(ns *netns.Handle, ifindex int, mac net.HardwareAddr, addrs []netip.Prefix) error {
	return ns.Do(func() error {
		var errs []error
		for _, a := range addrs {
			errs = append(errs, netlink.NeighAdd(&netlink.Neigh{LinkIndex: ifindex, IP: a.Addr().AsSlice(), State: netlink.NUD_PERMANENT, HardwareAddr: mac}))
		}
		return errors.Join(errs...)
	})
}

// send puts a frame on the cable. On return the host has usually processed it.
func (w *world) send(p *packet) error {
	if _, err := unix.Write(w.out, p.frame); err != nil {
		return fmt.Errorf("send a frame of %d bytes: %w", len(p.frame), err)
	}
	return nil
}
