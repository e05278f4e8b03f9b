// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"golang.org/x/sys/unix"
)

// limited sends a flood to a guarded socket and checks the received number against the limit. It
// first waits for the debt of the last flood to expire. Otherwise a whole flood may be refused
// within the debt.
func limited(t testing.TB, s udpServer, l Limit) {
	t.Helper()
	const n = 4000
	time.Sleep(debt(l))
	took := flood(t, s.LocalAddr(), n)
	if came := s.receivedOf(t, 1); came == 0 || came > most(l, took) {
		t.Errorf("%s: %d of %d arrived in %v, want 1 to %d", s.LocalAddr(), came, n, took, most(l, took))
	}
}

// unlimited sends a flood and expects all of it.
func unlimited(t testing.TB, s udpServer) {
	t.Helper()
	flood(t, s.LocalAddr(), 400)
	if came := s.receivedOf(t, 400); came != 400 {
		t.Errorf("%s: %d of 400 arrived", s.LocalAddr(), came)
	}
}

func TestServiceAtSockets(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	dns := func(o Options) Service { return guarded(t, "dns", o, "udp :5300", "tcp :5300") }
	v4, v6, other := listenUDP(t, "127.0.0.1:5300"), listenUDP(t, "[::1]:5300"), listenUDP(t, "127.0.0.1:5301")

	if said := w.apply(dns(Options{Limit: 100})); !slices.Equal(said, []string{"create guard of service dns: limit 100pps, at its sockets"}) {
		t.Errorf("the plan is %q", said)
	}
	limited(t, v4, 100)
	limited(t, v6, 100)
	unlimited(t, other)
	if said := w.apply(dns(Options{Limit: 100})); len(said) > 0 {
		t.Errorf("a second apply has steps %q", said)
	}
	before := w.state("dns")
	if before.Problem != "" || before.Refused == 0 || !before.UnderAttack {
		t.Errorf("its state is %+v", before)
	}

	// A changed limit changes the guard without recreating it: its state stays.
	if said := w.apply(dns(Options{Limit: 50})); !slices.Equal(said, []string{"change guard of service dns: limit 100pps → 50pps"}) {
		t.Errorf("the plan is %q", said)
	}
	limited(t, v4, 50)
	if after := w.state("dns"); after.Refused <= before.Refused {
		t.Errorf("refused %d, then %d: the counts were lost", before.Refused, after.Refused)
	}

	// The state also survives a restart of a member.
	v4.Close()
	v4 = listenUDP(t, "127.0.0.1:5300")
	limited(t, v4, 50)

	w.apply(dns(Options{Limit: 50, DryRun: true}))
	before = w.state("dns")
	unlimited(t, v4)
	if after := w.state("dns"); after.Refused == before.Refused {
		t.Error("the dry run counted no refused packets")
	}

	if said := w.apply(); !slices.Equal(said, []string{"remove guard of service dns"}) {
		t.Errorf("the plan is %q", said)
	}
	unlimited(t, v4)
	if left := w.pinned(); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestOtherNamespace checks a guard against affecting the same port of another namespace.
func TestOtherNamespace(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress, probe.PacketNetnsCookie)
	w.apply(guarded(t, "dns", Options{Limit: 50}, "udp :5300"))
	limited(t, listenUDP(t, "127.0.0.1:5300"), 50)
	err := netns.InNew(func() error {
		if err := netns.LoopbackUp(); err != nil {
			return err
		}
		unlimited(t, listenUDP(t, "127.0.0.1:5300"))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestEachDestination limits each address separately.
func TestEachDestination(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	w.apply(guarded(t, "dns", Options{Each: 50}, "udp 127.0.0.0/8:5300"))
	a, b := listenUDP(t, "127.0.0.1:5300"), listenUDP(t, "127.0.0.2:5300")
	limited(t, a, 50)
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 5)}, b.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		if _, err := c.Write([]byte("query")); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.receivedOf(t, 3); n != 3 {
		t.Errorf("%d of 3 datagrams from another source to the other address arrived", n)
	}
	d := w.state("dns").Destinations
	if len(d) != 2 || d[0].Address != netip.MustParseAddrPort("127.0.0.1:5300") || d[0].Refused == 0 || d[1].Refused != 0 || d[1].Passed != 3 {
		t.Errorf("destinations: %+v", d)
	}
}

// TestTwoServices checks two guards counting separately, with the longer prefix first.
func TestTwoServices(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	w.apply(guarded(t, "all", Options{Limit: 1000}, "udp 127.0.0.0/8:5300"), guarded(t, "one", Options{Limit: 50}, "udp 127.0.0.9:5300"))
	limited(t, listenUDP(t, "127.0.0.9:5300"), 50)
	if g := w.state("all"); g.Passed+g.Refused != 0 {
		t.Errorf("the other service counted %+v", g.Counts)
	}
	limited(t, listenUDP(t, "127.0.0.1:5300"), 1000)
}

func TestServiceAtInterfaces(t *testing.T) {
	need(t, kernel.XDPProgram)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-interfaces")}
	dns := func(o Options) Service {
		s := guarded(t, "dns", o, "udp :5300")
		s.Netns = wire.NameB
		return s
	}
	w.apply(dns(Options{Limit: 100, Interfaces: []string{nstest.WireDevice}}))
	defer w.apply()
	for _, a := range []netip.Addr{wire.B4, wire.B6} {
		to := netip.AddrPortFrom(a, 5300)
		var s udpServer
		if err := wire.B.Do(func() error { s = listenUDP(t, to.String()); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := wire.A.Do(func() error { limited(t, s, 100); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := wire.B.Do(func() error { unlimited(t, s); return nil }); err != nil { // over lo
			t.Fatal(err)
		}
		s.Close()
	}
	if g := w.state("dns"); g.Problem != "" {
		t.Errorf("problem: %s", g.Problem)
	}
	// From the interface to the sockets: the same guard decides at another hook.
	if probe.CgroupIngress.Check() != nil {
		return
	}
	before := w.state("dns").Refused
	if said := w.apply(dns(Options{Limit: 100})); len(said) != 1 || !strings.Contains(said[0], "at XDP of w0 → its sockets") {
		t.Errorf("the plan is %q", said)
	}
	err := wire.B.Do(func() error { limited(t, listenUDP(t, "127.0.0.1:5300"), 100); return nil })
	if after := w.state("dns").Refused; err != nil || after <= before {
		t.Errorf("%v; refused %d, then %d", err, before, after)
	}
}

// TestInterfaceComesAndGoes checks weir serve attaching a guard to an interface created later, and
// again to its successor with the same name.
func TestInterfaceComesAndGoes(t *testing.T) {
	need(t, kernel.XDPProgram)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-late")}
	dns := guarded(t, "dns", Options{Limit: 100, Interfaces: []string{"late0", nstest.WireDevice}}, "udp :5300")
	dns.Netns = wire.NameB
	w.apply(dns)
	defer w.apply()
	if p := w.state("dns").Problem; !strings.HasPrefix(p, "there is no interface late0: weir serve, or weir apply, attaches") {
		t.Errorf("without the interface: problem %q", p)
	}
	if said := w.apply(dns); len(said) > 0 {
		t.Errorf("a second apply has steps %q", said)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.DiscardHandler)) }()
	defer func() { cancel(); <-done }()
	to := netip.MustParseAddr("10.78.0.2")
	for range 2 {
		nstest.Cable(t, wire.A, "late0", wire.B, "late0")
		nstest.Address(t, wire.A, "late0", netip.MustParsePrefix("10.78.0.1/24"))
		nstest.Address(t, wire.B, "late0", netip.PrefixFrom(to, 24))
		attached(t, w)
		var s udpServer
		if err := wire.B.Do(func() error { s = listenUDP(t, netip.AddrPortFrom(to, 5300).String()); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := wire.A.Do(func() error { limited(t, s, 100); return nil }); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if err := wire.B.Do(func() error { return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "late0"}}) }); err != nil {
			t.Fatal(err)
		}
		if p := w.state("dns").Problem; !strings.HasPrefix(p, "there is no interface late0") {
			t.Errorf("after deleting the interface: problem %q", p)
		}
	}
}

// A renamed interface is not the guard's any more: the state says so, and weir serve or weir apply
// takes the guard off. A new interface with the name gets it.
func TestInterfaceRenamed(t *testing.T) {
	need(t, kernel.XDPProgram)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-renamed")}
	dns := guarded(t, "dns", Options{Limit: 100, Interfaces: []string{"old0", nstest.WireDevice}}, "udp :5300")
	dns.Netns = wire.NameB
	nstest.Cable(t, wire.A, "old0", wire.B, "old0")
	w.apply(dns)
	defer w.apply()
	rename := func(from, to string) {
		t.Helper()
		if err := wire.B.Do(func() error {
			l, err := netlink.LinkByName(from)
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, to), netlink.LinkSetUp(l))
		}); err != nil {
			t.Fatal(err)
		}
	}
	rename("old0", "new0")
	if p := w.state("dns").Problem; !strings.HasPrefix(p, "still attached at new0, named by no guard and perhaps renamed from old0: ") {
		t.Errorf("after the rename: %q", p)
	}
	const absent = "there is no interface old0: "
	w.apply(dns)
	if p := w.state("dns").Problem; !strings.HasPrefix(p, absent) {
		t.Errorf("after weir apply: %q", p)
	}
	rename("new0", "old0")
	w.apply(dns)
	attached(t, w)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.DiscardHandler)) }()
	defer func() { cancel(); <-done }()
	rename("old0", "new0")
	nstest.Eventually(t, func() error {
		if p := w.state("dns").Problem; !strings.HasPrefix(p, absent) {
			return errors.New(p)
		}
		return nil
	})
	nstest.Cable(t, wire.A, "old1", wire.B, "old0")
	attached(t, w)
}

// A change is refused if a working guard would move to missing interfaces only. One of several
// interfaces may be missing.
func TestRefusesAbsentInterface(t *testing.T) {
	need(t, kernel.XDPProgram)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-absent")}
	dns := func(interfaces ...string) Service {
		s := guarded(t, "dns", Options{Limit: 100, Interfaces: interfaces}, "udp :5300")
		s.Netns = wire.NameB
		return s
	}
	refused := func(was, want []string, from string) {
		t.Helper()
		w.apply(dns(was...))
		have, err := readGuards(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Feature{}.Plan(t.Context(), have, Config{[]Service{dns(want...)}})
		if err != nil {
			t.Fatal(err)
		}
		text := "services.dns.guard: interfaces: it works at " + from + " now, and would not at absent0: there is no interface absent0 in "
		if from == "" && len(p.Outages) > 0 || from != "" && (len(p.Outages) != 1 || !strings.Contains(p.Outages[0], text)) {
			t.Errorf("%q → %q: outages %q", was, want, p.Outages)
		}
	}
	defer w.apply()
	const there, absent, other = nstest.WireDevice, "absent0", "absent1"
	refused([]string{there}, []string{absent}, there)
	refused([]string{there}, []string{there, absent}, "")
	refused([]string{there, other}, []string{other}, "")
	refused([]string{there, other}, []string{absent, other}, there)
	refused([]string{other}, []string{other}, "")
	refused([]string{other}, []string{absent}, "")
	if probe.CgroupIngress.Check() == nil {
		refused(nil, []string{absent}, "its sockets")
		refused(nil, []string{there}, "")
		refused([]string{there}, nil, "")
	}
}

// A guard with a removed network namespace reports it.
func TestNamespaceGoes(t *testing.T) {
	need(t, kernel.XDPProgram)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-gone")}
	dns := guarded(t, "dns", Options{Limit: 100, Interfaces: []string{nstest.WireDevice}}, "udp :5300")
	dns.Netns = wire.NameB
	w.apply(dns)
	defer w.apply()
	wire.B.Close()
	if err := netns.Delete(wire.NameB); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		if p := w.state("dns").Problem; !strings.HasPrefix(p, "its network namespace is gone") {
			return fmt.Errorf("problem %q", p)
		}
		return nil
	})
}

// attached waits until the guard has no problem.
func attached(t *testing.T, w *world) {
	t.Helper()
	nstest.Eventually(t, func() error {
		if w.state("dns").Problem != "" {
			return errors.New(w.state("dns").Problem)
		}
		return nil
	})
}

func TestConfigErrors(t *testing.T) {
	for want, s := range map[string]Service{
		"no limit":               guarded(t, "a", Options{}, "udp :53"),
		"has no UDP listen":      guarded(t, "a", Options{Limit: 5}, "tcp :53"),
		"named twice":            guarded(t, "a", Options{Limit: 5, Interfaces: []string{"v0", "v0"}}, "udp :53"),
		"want an interface name": guarded(t, "a", Options{Limit: 5, Interfaces: []string{""}}, "udp :53"),
	} {
		c := Config{[]Service{s}}
		if errs := c.Validate(); len(errs) != 1 || !strings.Contains(errs[0].Error(), want) {
			t.Errorf("got %v, want an error with %q", errs, want)
		}
	}
	named := []string{"v1", "v0"}
	if errs := (&Config{[]Service{guarded(t, "a", Options{Limit: 5, Interfaces: named}, "udp :53")}}).Validate(); len(errs) != 0 || !slices.Equal(named, []string{"v1", "v0"}) {
		t.Errorf("the check changed the configuration's interfaces to %q: %v", named, errs)
	}
	w := newWorld(t)
	for want, services := range map[string][]Service{
		"is already guarded by service a":  {guarded(t, "a", Options{Limit: 5}, "udp :53"), guarded(t, "b", Options{Limit: 5}, "udp4 :53")},
		"has more than 8 guarded prefixes": {guarded(t, "a", Options{Limit: 5}, "udp 10.0.0.1:53", "udp 10.0.0.2:53", "udp 10.0.0.3:53", "udp 10.0.0.4:53", "udp 10.0.0.5:53", "udp 10.0.0.6:53", "udp 10.0.0.7:53", "udp 10.0.0.8:53", "udp 10.0.0.9:53")},
	} {
		if said, err := applyTo(w.root, Config{services}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %q, %v, want an error with %q", said, err, want)
		}
	}
}

// TestKilled kills the first apply, a change and a removal at each of their steps. The previous
// guard remains in effect until the next command, which completes the change.
func TestKilled(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	s := listenUDP(t, "127.0.0.1:5300")
	a := guarded(t, "dns", Options{Limit: 100}, "udp :5300")
	b := guarded(t, "dns", Options{Limit: 50}, "udp :5300", "udp :5302")
	for _, c := range []struct {
		name     string
		from, to []Service
		limit    Limit // afterwards
	}{{"create", nil, []Service{a}, 100}, {"change", []Service{a}, []Service{b}, 50}, {"remove", []Service{b}, nil, 0}} {
		for step := 0; ; step++ {
			w.apply(c.from...)
			ended := w.killedApply(step, c.to...)
			if len(c.from) > 0 && len(c.to) > 0 {
				limited(t, s, 100) // the old limit or the new one
			}
			w.apply(c.to...)
			if c.limit > 0 {
				if p := w.state("dns").Problem; p != "" {
					t.Errorf("%s, killed after %d steps: %s", c.name, step, p)
				}
				limited(t, s, c.limit)
			} else if left := w.pinned(); len(left) > 0 {
				t.Errorf("%s, killed after %d steps: %q remains", c.name, step, left)
			}
			if ended {
				if step < 3 {
					t.Errorf("%s: only %d steps", c.name, step)
				}
				break
			}
			if testing.Short() {
				step += 4
			}
		}
	}
}

// TestUpgrade replaces another weir's programs under their links. The guard's state stays.
func TestUpgrade(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	s := listenUDP(t, "127.0.0.1:5300")
	mine := object
	object = append(slices.Clone(mine), 0) // ELF ignores trailing bytes
	w.apply(guarded(t, "dns", Options{Limit: 50}, "udp :5300"))
	object = mine
	limited(t, s, 50)
	before := w.state("dns")
	for i, want := range []int{1, 0} {
		if steps, err := featuretest.Upgrade(t.Context(), w.root, Feature{}); err != nil || len(steps) != want {
			t.Fatalf("turn %d: %v, %v; want %d steps", i, steps, err, want)
		}
	}
	limited(t, s, 50)
	if after := w.state("dns"); after.Problem != "" || after.Refused <= before.Refused {
		t.Errorf("after the upgrade: %+v", after)
	}
}

// TestTCPPasses checks TCP connections to a guarded service's port during a flood.
func TestTCPPasses(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	w.apply(guarded(t, "dns", Options{Limit: 1}, "udp :5300", "tcp :5300"))
	limited(t, listenUDP(t, "127.0.0.1:5300"), 1)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Port: 5300, Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 50)); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		c, err := net.Dial("tcp", "127.0.0.1:5300")
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}
