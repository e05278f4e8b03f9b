// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// The test verifies the table in docs/FILTER-LANGUAGE.md: hooks before and after reassembly. Active
// conntrack reassembles before input, the remedy for IPv6.
func TestFragments(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("need: tool nft (Debian package nftables)")
	}
	const size, whole, parts = 4000, "whole", "parts"
	for _, h := range []Hook{HookNetfilter, HookNFT} {
		for _, c := range []struct {
			at        Point
			conntrack bool
			ip4, ip6  string
		}{
			{"prerouting", false, parts, parts}, {"forward", false, parts, parts}, {"forward", true, whole, whole}, {"input", false, whole, parts}, {"output", false, whole, whole}, {"postrouting", false, whole, whole},
			{"prerouting", true, whole, whole}, {"input", true, whole, whole},
		} {
			name := string(h) + " " + string(c.at)
			if c.conntrack {
				name += " with conntrack"
			}
			t.Run(name, func(t *testing.T) {
				needHook(t, h)
				t.Parallel()
				w := newWorld(t)
				if c.conntrack {
					if err := w.B.Do(func() error {
						return exec.Command("nft", "add table inet t; add chain inet t c { type filter hook prerouting priority -300; }; add rule inet t c ct state new accept").Run()
					}); err != nil {
						t.Skip("need: kernel: conntrack for nftables")
					}
				}
				count := func(name, text string) Rule {
					return Rule{Name: name, Match: Expression{Text: text}, Action: Count}
				}
				f := w.filter(h, count("whole4", "ip and udp.dstport == 5001 and len(payload) == 4000 and payload[-5:] == \"xyzzy\""),
					count("whole6", "ipv6 and udp.dstport == 5001 and len(payload) == 4000 and payload[-5:] == \"xyzzy\""),
					count("parts4", "ip.proto == 17 and (ip.flags.mf or ip.frag_offset > 0)"), count("parts6", "ipv6.fraghdr"))
				f.At = c.at
				if c.at == "output" || c.at == "postrouting" {
					f.Netns = w.NameA
				}
				if c.at == "prerouting" { // after conntrack's defragmentation (-400) and its own hook (-200)
					f.Priority = -100
				}
				w.apply(f)
				at, to4, to6 := w.B, w.B4, w.B6
				if c.at == "forward" {
					at, to4, to6 = behind(t, w.Wire)
				}
				data := []byte(strings.Repeat("a", size-5) + "xyzzy")
				for _, addrs := range [][2]netip.Addr{{w.A4, to4}, {w.A6, to6}} {
					to := nstest.ListenUDP(t, at, netip.AddrPortFrom(addrs[1], 5001))
					from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(addrs[0], 0))
					if _, err := from.WriteTo(data, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addrs[1], 5001))); err != nil {
						t.Fatal(err)
					}
					if err := to.SetReadDeadline(time.Now().Add(patience)); err != nil {
						t.Fatal(err)
					}
					if n, _, err := to.ReadFrom(make([]byte, size+1)); err != nil || n != size {
						t.Fatalf("to %s: %d bytes, %v", addrs[1], n, err)
					}
				}
				got := map[string]uint64{}
				for _, r := range w.one().Rules {
					got[r.Name] = r.Packets
				}
				for family, want := range map[string]string{"4": c.ip4, "6": c.ip6} {
					if is := got["whole"+family] == 1 && got["parts"+family] == 0; is != (want == whole) || !is && got["parts"+family] < 3 {
						t.Errorf("IPv%s: got %v, want %s", family, got, want)
					}
				}
			})
		}
	}
}

// behind makes B a router and adds a host behind it.
func behind(t *testing.T, w *nstest.Wire) (host *netns.Handle, to4, to6 netip.Addr) {
	t.Helper()
	host = nstest.NewNetns(t)
	nstest.Cable(t, w.B, "behind", host, nstest.WireDevice)
	nstest.Address(t, w.B, "behind", netip.MustParsePrefix("10.78.0.1/24"), netip.MustParsePrefix("fd78::1/64"))
	to4, to6 = netip.MustParseAddr("10.78.0.2"), netip.MustParseAddr("fd78::2")
	nstest.Address(t, host, nstest.WireDevice, netip.PrefixFrom(to4, 24), netip.PrefixFrom(to6, 64))
	for _, x := range []struct {
		in   *netns.Handle
		args []string
	}{
		{w.B, []string{"sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"}},
		{w.A, []string{"ip", "route", "add", "10.78.0.0/24", "via", w.B4.String()}},
		{w.A, []string{"ip", "route", "add", "fd78::/64", "via", w.B6.String()}},
		{host, []string{"ip", "route", "add", "default", "via", "10.78.0.1"}},
		{host, []string{"ip", "-6", "route", "add", "default", "via", "fd78::1"}},
	} {
		if _, err := exec.LookPath(x.args[0]); err != nil {
			t.Skip("need: tool", x.args[0])
		}
		if err := x.in.Do(func() error {
			out, err := exec.Command(x.args[0], x.args[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%q: %w: %s", x.args, err, out)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	nstest.AwaitAddresses(t, w.B)
	nstest.AwaitAddresses(t, host)
	return host, to4, to6
}

// The plan warns of payload rules evaded by fragments before reassembly.
func TestWarnsOfFragments(t *testing.T) {
	w := newWorld(t)
	const payload, ports = `udp.dstport == 53 and payload contains "a"`, "udp.dstport == 53"
	const fragments4, fragments6 = "ip.flags.mf or ip.frag_offset > 0", "ipv6.fraghdr"
	const neither, both, only4, only6 = "", "IPv4 and IPv6", "IPv4", "IPv6"
	drop := func(text string) Rule { return Rule{Match: Expression{Text: text}, Action: Drop} }
	pass := func(text string) Rule { return Rule{Match: Expression{Text: text}, Action: Pass} }
	count := func(text string) Rule { return Rule{Match: Expression{Text: text}, Action: Count} }
	for _, c := range []struct {
		hook  Hook
		at    Point
		rest  Action
		rules []Rule
		warns string // families of the fragments
	}{
		{HookNFT, "", Pass, []Rule{drop(ports), drop(payload)}, only6},
		{HookNetfilter, "input", Pass, []Rule{drop("sip.method")}, only6},
		{HookNFT, "", Pass, []Rule{drop(ports)}, neither},
		{HookNFT, "", Pass, []Rule{count(payload)}, neither},
		// An earlier drop rule for fragments prevents evasion. Nothing else does.
		{HookNFT, "", Pass, []Rule{drop(fragments6), drop(payload)}, neither},
		{HookNFT, "", Pass, []Rule{pass(fragments6), drop(payload)}, only6},
		{HookNFT, "", Pass, []Rule{count(fragments6), drop(payload)}, only6},
		{HookNFT, "", Pass, []Rule{drop(payload), drop(fragments6)}, only6},
		{HookNFT, "", Pass, []Rule{drop(fragments4), drop(payload)}, only6},
		// If no later rule passes packets, fragments are dropped.
		{HookNFT, "", Drop, []Rule{pass(payload)}, neither},
		{HookNFT, "", Drop, []Rule{drop(payload)}, neither},
		{HookNFT, "", Drop, []Rule{drop(payload), pass("udp")}, only6},
		{HookNFT, "", Pass, []Rule{pass(payload), drop(ports)}, only6},
		{HookNFT, "", Drop, []Rule{pass("ip.src == 10.0.0.1"), pass(payload)}, neither},
		// The hooks and families of docs/FILTER-LANGUAGE.md.
		{HookNFT, "", Pass, []Rule{drop("ip and " + payload)}, neither},
		{HookNFT, "output", Pass, []Rule{drop(payload)}, neither},
		{HookNetfilter, "postrouting", Pass, []Rule{drop(payload)}, neither},
		{HookNFT, "prerouting", Pass, []Rule{drop(payload)}, both},
		{HookNetfilter, "forward", Pass, []Rule{drop(payload)}, both},
		{HookNFT, "forward", Pass, []Rule{drop("ip and " + payload)}, only4},
		{HookTCX, "", Pass, []Rule{drop(payload)}, both},
		{HookXDP, "", Pass, []Rule{drop("ipv6 and " + payload)}, only6},
		{HookXDP, "", Pass, []Rule{drop(fragments6), drop(payload)}, only4},
		{HookXDP, "", Pass, []Rule{drop(fragments4 + " or " + fragments6), drop(payload)}, neither},
	} {
		f := w.filter(c.hook, c.rules...)
		f.At, f.Default = c.at, c.rest
		if c.rest == Drop && c.hook.ofDevices() {
			t.Fatal("a filter dropping ARP has an additional warning")
		}
		p, err := Feature{}.Plan(t.Context(), State{}, Config{Filters: []Filter{f}})
		ok := err == nil && len(p.Warnings) == 0
		if c.warns != neither {
			ok = err == nil && len(p.Warnings) == 1 && strings.Contains(p.Warnings[0], ": fragmented "+c.warns+" datagrams")
		}
		if !ok {
			t.Errorf("%s %s, default %s, %v: %v, %q; want one of %q", c.hook, c.at, c.rest, c.rules, err, p.Warnings, c.warns)
		}
	}
}
