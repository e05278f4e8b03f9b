// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestUnserved checks that a backend gets no new flows of a service without a server there. It gets them again as
// soon as a member, or a server without a keeper, is ready.
func TestUnserved(t *testing.T) {
	w := newNetwork(t, 2, at4)
	web := netip.AddrPortFrom(w.at.Addr(), w.at.Port()+1) // its server does not use a keeper
	cert, key, signers := w.ca.Files("lb")
	w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2]
register: true
services:
  talk: {number: 3, listen: [tcp %s]}
  web: {number: 4, listen: [tcp %s]}
`, cert, key, signers, w.at, web))
	for i, s := range w.servers {
		s.keep()
		w.playBackend(i, s)
		s.serve()
	}
	second := w.servers[1]
	at := func() int {
		c, err := w.tryDial(w.at)
		if err != nil {
			return 0
		}
		defer c.Close()
		if err := c.ask("new"); err != nil {
			return 0 // not accepted
		}
		return w.serves(c)
	}
	alone := func() bool { // reports whether all flows go to the first backend
		for range 20 {
			if at() != 1 {
				return false
			}
		}
		return true
	}
	unserved := func() string { return strings.Join(second.status().Unserved, " ") }
	w.eventually("new flows come to the second server", func() bool { return at() == 2 })
	for range 2 { // first its listener ends with the member, then it stays with the keeper
		second.member.Close()
		w.eventually("the agent has told that nobody serves the service", func() bool { return unserved() == "talk web" })
		w.eventually("new flows go to the first server alone", alone)
		second.serve()
		w.eventually("new flows come again", func() bool { return at() == 2 })
	}
	w.eventually("nobody serves the other service", func() bool { return unserved() == "web" })
	var plain net.Listener
	w.in(second.ns, func() (err error) { plain, err = net.Listen("tcp", web.String()); return err })
	defer plain.Close()
	w.eventually("a server that is no member serves it", func() bool { return unserved() == "" })
	address := &netlink.Addr{IPNet: netlink.NewIPNet(net.IP(w.at.Addr().AsSlice()))}
	change := func(f func(netlink.Link, *netlink.Addr) error) {
		w.in(second.ns, func() error {
			lo, err := netlink.LinkByName("lo")
			if err == nil {
				err = f(lo, address)
			}
			return err
		})
	}
	change(netlink.AddrDel)
	w.eventually("the services' address is not local", func() bool { return unserved() == "talk web" })
	w.eventually("new flows go to the first server alone", alone)
	change(netlink.AddrAdd)
	w.eventually("the address is local again", func() bool { return unserved() == "" })
}
