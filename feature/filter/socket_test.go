// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// A program filters its own UDP and TCP sockets of both families.
func TestSocket(t *testing.T) {
	nstest.NeedRoot(t)
	w := nstest.NewWire(t)
	for name, addr := range map[string][2]netip.Addr{"IPv4": {w.A4, w.B4}, "IPv6": {w.A6, w.B6}} {
		t.Run(name, func(t *testing.T) {
			to := nstest.ListenUDP(t, w.B, netip.AddrPortFrom(addr[1], 0))
			good := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(addr[0], 7001))
			bad := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(addr[0], 7002))
			s, err := AttachSocket(to, []Rule{{Name: "bad", Match: Expression{Text: "udp.srcport == 7002"}, Action: Drop}}, Pass)
			if err != nil {
				t.Fatal(err)
			}
			if !nstest.Arrives(t, good, to, true) || nstest.Arrives(t, bad, to, false) {
				t.Error("the rules do not apply")
			}
			if _, err := AttachSocket(to, s.form.Rules, Pass); !errors.Is(err, kernel.ErrOccupied) {
				t.Errorf("a second filter: %v", err)
			}
			nstest.Until(t, "the packet that is dropped is counted", func() bool {
				rules, _, err := s.Rules()
				return err != nil || rules[0].Packets > 0
			})
			rules, def, err := s.Rules()
			if err != nil || len(rules) != 1 || rules[0].Packets != 1 || def.Packets != 1 {
				t.Errorf("%+v, %+v, %v", rules, def, err)
			}
			if err := s.Replace([]Rule{{Match: Expression{Text: `payload contains "are you"`}, Action: Drop}}, Pass); err != nil {
				t.Fatal(err)
			}
			if nstest.Arrives(t, good, to, false) {
				t.Error("the new rules do not apply")
			}
			if err := s.Replace([]Rule{{Match: Expression{Text: "ip.src == 300"}, Action: Drop}}, Pass); !IsExpressionError(err) {
				t.Errorf("a bad expression: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if !nstest.Arrives(t, bad, to, true) {
				t.Error("the filter is still attached")
			}
		})
	}
	t.Run("TCP", func(t *testing.T) {
		var l, mptcp net.Listener
		if err := w.B.Do(func() (err error) {
			lc := net.ListenConfig{}
			if mptcp, err = lc.Listen(t.Context(), "tcp4", w.B4.String()+":0"); err != nil {
				return err
			}
			lc.SetMultipathTCP(false)
			l, err = lc.Listen(t.Context(), "tcp4", w.B4.String()+":0")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		defer mptcp.Close()
		if m, err := AttachSocket(mptcp.(*net.TCPListener), []Rule{drops(53)}, Pass); err == nil {
			m.Close() // a kernel without MPTCP
		} else if !strings.Contains(err.Error(), "SetMultipathTCP(false)") {
			t.Errorf("an MPTCP listener: %v", err)
		}
		s, err := AttachSocket(l.(*net.TCPListener), []Rule{{Match: Expression{Text: "tcp.srcport == 7003"}, Action: Drop}}, Pass)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for port, want := range map[int]bool{7003: false, 7004: true} {
			err := w.A.Do(func() error {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: w.A4.AsSlice(), Port: port}, Timeout: patience}
				if !want {
					d.Timeout = 300 * time.Millisecond
				}
				c, err := d.Dial("tcp4", l.Addr().String())
				if err == nil {
					c.Close()
				}
				return err
			})
			if (err == nil) != want {
				t.Errorf("from port %d: %v", port, err)
			}
		}
	})
}

// Rules of a socket use short and long lists. Replace replaces the lists too.
func TestSocketLists(t *testing.T) {
	w := nstest.NewWire(t)
	to := nstest.ListenUDP(t, w.B, netip.AddrPortFrom(w.B4, 0))
	from := nstest.ListenUDP(t, w.A, netip.AddrPortFrom(w.A4, 7001))
	near := []netip.Prefix{netip.PrefixFrom(w.A4, 24)} // not masked
	var far []netip.Prefix
	for i := range 2 * shortList {
		far = append(far, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32))
	}
	rules := []Rule{{Match: Expression{Text: "net.src in $bogons"}, Action: Drop}}
	s, err := AttachSocket(to, rules, Pass, List{"bogons", near}, List{"unused", far})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for name, x := range map[string]struct {
		list    []netip.Prefix
		arrives bool
	}{"short": {near, false}, "empty": {nil, true}, "long": {append(near, far...), false}, "of others": {far, true}} {
		if err := s.Replace(rules, Pass, List{"bogons", x.list}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if nstest.Arrives(t, from, to, x.arrives) != x.arrives {
			t.Errorf("the list %q does not apply", name)
		}
	}
	for want, lists := range map[string][]List{"there is no list": {{"others", near}}, "duplicate name": {{"bogons", near}, {"bogons", far}},
		"entry 2 is not a valid prefix": {{"bogons", append(near, netip.Prefix{})}}} {
		if err := s.Replace(rules, Pass, lists...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	file := filepath.Join(t.TempDir(), "bogons")
	if err := os.WriteFile(file, []byte("10.0.0.0/8 # private\n::1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := ReadList("bogons", file); err != nil || l.Name != "bogons" || len(l.Prefixes) != 2 {
		t.Errorf("%+v, %v", l, err)
	}
}

// An unknown action is an error and does not pass packets.
func TestSocketActions(t *testing.T) {
	nstest.NeedRoot(t)
	to := nstest.ListenUDP(t, nstest.NewNetns(t), netip.MustParseAddrPort("127.0.0.1:0"))
	for _, x := range []struct {
		action, byDefault Action
		want              string
	}{
		{"", Pass, `rule 1: action "": want drop, pass or count`}, {"deny", Pass, `rule 1: action "deny"`},
		{Drop, "accept", `default "accept": want pass or drop`}, {Drop, Count, `default "count"`},
	} {
		s, err := AttachSocket(to, []Rule{{Match: Expression{Text: "udp"}, Action: x.action}}, x.byDefault)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%q, default %q: %v, want %s", x.action, x.byDefault, err, x.want)
		}
	}
}

// Compiling the same rules always yields the same program. Upgrades depend on it.
func TestProgramIsTheSame(t *testing.T) {
	f := Filter{Name: "many", Hook: HookTCX, Lists: map[string]string{}}.withDefaults()
	lists := map[string]*list{"a": {Segments: 1}, "b": {Segments: 2}, "c": {}}
	for _, text := range []string{"ip.src in $a or ip.dst in $b", "ip6.src in $b", "ip.src in $c"} {
		f.Rules = append(f.Rules, Rule{Match: Expression{Text: text}, Action: Drop})
	}
	for i := range 200 {
		f.Rules = append(f.Rules, drops(1000+i))
	}
	var first [32]byte
	for i := range 20 {
		c, err := f.compile(viewTC, lists)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = c.hash()
		} else if c.hash() != first {
			t.Fatal("a second compilation gives a different program")
		}
	}
}
