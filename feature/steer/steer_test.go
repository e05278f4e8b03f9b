// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

var loopback4 = netip.MustParseAddrPort("127.0.0.1:9991")

// check asks over both protocols from every source and compares the answer with expect for the source's assignment.
func (w *world) check(addrs []netip.Addr, to netip.AddrPort, expect func(state.Assignment) string) {
	w.t.Helper()
	for _, p := range w.where(addrs...) {
		to := to
		if !to.Addr().IsValid() { // each source's own address, so UDP answers come from it
			to = netip.AddrPortFrom(p.Address, to.Port())
		}
		for _, proto := range slots.Protocols {
			if got, want := ask(w.t, proto, p.Address, to), expect(p); got != want {
				w.t.Errorf("%s from %s (bucket %d, slot %d): answered by %s, want %s", proto, p.Address, p.Bucket, p.Slot, got, want)
			}
		}
	}
}

func names(sinks ...*sink) func(state.Assignment) string {
	return func(p state.Assignment) string {
		if s := sinks[p.Slot]; s != nil {
			return fmt.Sprint(s.pid())
		}
		return refused
	}
}

func TestSameSlotForAllProtocols(t *testing.T) { eachEngine(t, testSameSlotForAllProtocols) }

func testSameSlotForAllProtocols(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 3}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(2, b)
	w.apply()
	src := sources(60)
	w.check(src, loopback4, names(a, nil, b))
	st := w.state()
	var counted uint64
	for _, s := range st.Slots {
		udp, tcp := s.Verdicts["udp"], s.Verdicts["tcp"]
		counted += udp.Steered + tcp.Steered + udp.Rejected + tcp.Rejected
		if s.Slot == 1 && (udp.Rejected == 0 || tcp.Rejected == 0 || udp.Steered+tcp.Steered != 0) {
			t.Errorf("empty slot counted %+v %+v", udp, tcp)
		}
		if s.Slot != 1 && (udp.Rejected+tcp.Rejected != 0 || udp.Steered == 0) {
			t.Errorf("slot %d counted %+v %+v", s.Slot, udp, tcp)
		}
	}
	// Late segments of closed connections and ICMP errors are looked up too, so allow a few more.
	if sent := uint64(2 * len(src)); counted < sent || counted > sent+5 {
		t.Errorf("counted %d packets, sent %d", counted, sent)
	}
	if again := w.apply(); len(again) != 0 {
		t.Errorf("applied again, it would %v", again)
	}
}

func TestCrashRejectsOnlyItsOwn(t *testing.T) { eachEngine(t, testCrashRejectsOnlyItsOwn) }

func testCrashRejectsOnlyItsOwn(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	src := sources(40)
	w.check(src, loopback4, names(a, b))
	a.kill()
	w.check(src, loopback4, names(nil, b))
	if r := w.state().Slots[0].Reason; !strings.Contains(r, "exited") {
		t.Errorf("reason of the empty slot: %q", r)
	}
	// The restarted daemon is not admitted yet and must get nothing.
	a = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.check(src, loopback4, names(nil, b))
	w.member(0, a)
	w.apply()
	w.check(src, loopback4, names(a, b))
	// All members exit and return. No socket holder is needed.
	a.kill()
	b.kill()
	w.check(src[:10], loopback4, names(nil, nil))
	b = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(1, b)
	w.apply()
	w.check(src, loopback4, names(nil, b))
}

// TestHalfAMemberGetsNothing: a slot is withdrawn for every protocol when one socket closes, without a running weir
// process.
func TestHalfAMemberGetsNothing(t *testing.T) { eachEngine(t, testHalfAMemberGetsNothing) }

func testHalfAMemberGetsNothing(t *testing.T) {
	for i, closes := range []string{"udp", "tcp"} {
		t.Run(closes, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.apply()
			w.check(sources(3), loopback4, names(a))
			a.do(fmt.Sprintf("close %d", i))
			w.check(sources(3), loopback4, names(nil))
			if r := w.state().Slots[0].Reason; !strings.Contains(r, "closed "+closes) {
				t.Errorf("reason: %q", r)
			}
			// It opens the socket again: complete, once registered.
			a.do(fmt.Sprintf("open %s4=0.0.0.0:9991", closes))
			w.check(sources(3), loopback4, names(nil))
			w.apply()
			w.check(sources(3), loopback4, names(a))
		})
	}
}

// TestOrphansHoldNoSlot: a slot is withdrawn with its process although a child keeps all sockets open. pmacct's plugins
// inherit the core's listener.
func TestOrphansHoldNoSlot(t *testing.T) { eachEngine(t, testOrphansHoldNoSlot) }

func testOrphansHoldNoSlot(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	needExitHook(t)
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	a.do("orphan")
	w.member(0, a)
	w.apply()
	w.check(sources(3), loopback4, names(a))
	a.kill()
	w.check(sources(3), loopback4, names(nil))
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, b)
	w.apply()
	w.check(sources(10), loopback4, names(b))
}

func TestOnEmpty(t *testing.T) { eachEngine(t, testOnEmpty) }

func testOnEmpty(t *testing.T) {
	for _, mode := range []spec.OnEmpty{spec.Reject, spec.Drop, spec.Next, spec.Pass} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 4, OnEmpty: mode}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(1, a)
			w.member(3, b)
			w.apply()
			defer func() { patience = patienceUsual }()
			both := []string{fmt.Sprint(a.pid()), fmt.Sprint(b.pid())}
			for _, p := range w.where(sources(16)...) {
				patience = patienceUsual
				if mode == spec.Drop && !p.Admitted { // silence is expected
					patience = 300 * time.Millisecond
				}
				udp, tcp := ask(t, "udp", p.Address, loopback4), ask(t, "tcp", p.Address, loopback4)
				var ok bool
				switch {
				case p.Admitted:
					ok = udp == tcp && udp == both[p.Slot/2]
				case mode == spec.Reject:
					ok = udp == refused && tcp == refused
				case mode == spec.Drop:
					ok = udp == silence && tcp == silence
				case mode == spec.Next:
					ok = udp == tcp && p.Instead != nil && udp == both[*p.Instead/2] && udp == fmt.Sprint(p.PID)
				case mode == spec.Pass: // the kernel chooses for each protocol
					ok = slices.Contains(both, udp) && slices.Contains(both, tcp)
				}
				if !ok {
					t.Errorf("%s, slot %d: udp %s, tcp %s, place %+v", p.Address, p.Slot, udp, tcp, p)
				}
			}
		})
	}
}

// TestBoundElsewhere uses members on other ports without SO_REUSEPORT.
func TestBoundElsewhere(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4!=127.0.0.1:7001", "tcp4!=127.0.0.1:7001")
	b := startSink(t, "udp4!=127.0.0.1:7002", "tcp4!=0.0.0.0:7003")
	w.member(0, a, "udp 127.0.0.1:7001", "tcp 127.0.0.1:7001")
	w.member(1, b, "udp 127.0.0.1:7002", "tcp 0.0.0.0:7003")
	w.apply()
	for _, p := range w.where(sources(20)...) {
		want := fmt.Sprint([]*sink{a, b}[p.Slot].pid())
		if got := ask(t, "tcp", p.Address, loopback4); got != want {
			t.Errorf("tcp from %s: %s, want %s", p.Address, got, want)
		}
	}
	// The daemons' own ports are not steered.
	if got := ask(t, "tcp", sources(1)[0], netip.MustParseAddrPort("127.0.0.1:7003")); got != fmt.Sprint(b.pid()) {
		t.Errorf("the daemon's own port is answered by %s", got)
	}
}

func TestIPv6AndDualStack(t *testing.T) { eachEngine(t, testIPv6AndDualStack) }

func testIPv6AndDualStack(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp [::]:9991", "tcp [::]:9991")
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	var src []netip.Addr
	for i := range 16 {
		a := netip.MustParseAddr(fmt.Sprintf("fd00:1::%x", i+1))
		src = append(src, a)
		addr := &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice()), Flags: unix.IFA_F_NODAD}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			t.Fatal(err)
		}
		// Other tests use these addresses at the far end of a cable.
		t.Cleanup(func() { netlink.AddrDel(lo, addr) })
	}
	a := startSink(t, "udp=[::]:9991", "tcp=[::]:9991")
	b := startSink(t, "udp=[::]:9991", "tcp=[::]:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	to6 := netip.AddrPortFrom(netip.Addr{}, 9991)
	w.check(src, to6, names(a, b))
	w.check(sources(16), loopback4, names(a, b)) // the same sockets over IPv4
	b.kill()
	w.check(src, to6, names(a, nil))
	w.check(sources(16), loopback4, names(a, nil))
}

func TestLongerPrefixWins(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991")
	w.member(0, a)
	b, c := startSink(t, "udp4!=127.9.0.1:7001"), startSink(t, "udp4!=127.9.0.1:7002")
	for i, s := range []*sink{b, c} {
		v := newWorld(t, spec.Options{Slots: 1}, []string{"udp 127.9.0.0/16:9991", "udp 127.9.9.9:9991"}[i])
		v.member(0, s, fmt.Sprintf("udp 127.9.0.1:%d", 7001+i))
		svc := v.cfg.Services[0]
		svc.Name = []string{"wide", "narrow"}[i]
		w.cfg.Services = append(w.cfg.Services, svc)
	}
	w.apply()
	for to, want := range map[string]*sink{"127.0.0.1": a, "127.9.0.7": b, "127.9.9.8": b, "127.9.9.9": c, "127.10.0.1": a} {
		// a answers in order, so earlier datagrams are answered and the ICMP errors about them counted.
		ask(t, "udp", sources(1)[0], loopback4)
		// The answer comes from another address, so compare only the counters.
		name := map[*sink]string{a: "svc", b: "wide", c: "narrow"}[want]
		before, after := w.countedFor(name, netip.AddrPortFrom(netip.MustParseAddr(to), 9991))
		for n := range after {
			d := after[n] - before[n]
			// There may be more than one: an ICMP error about the answer is looked up like its datagram.
			if (n == name) != (d > 0) {
				t.Errorf("to %s: service %s counted %d, want %s", to, n, d, name)
			}
		}
	}
	// Without the narrow service its traffic goes to the wide one.
	w.cfg.Services = w.cfg.Services[:2]
	w.apply()
	w.countedFor("wide", netip.MustParseAddrPort("127.9.9.9:9991"))
}

// countedFor sends a datagram and waits until a service has counted it. It returns all counts before and after.
func (w *world) countedFor(name string, to netip.AddrPort) (before, after map[string]uint64) {
	w.t.Helper()
	before = w.counts()
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: sources(1)[0].AsSlice()}, net.UDPAddrFromAddrPort(to))
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		w.t.Fatal(err)
	}
	nstest.Until(w.t, fmt.Sprintf("service %s has counted what was sent to %s", name, to), func() bool { return w.counts()[name] > before[name] })
	return before, w.counts()
}

func (w *world) counts() map[string]uint64 {
	w.t.Helper()
	st, err := state.Read(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, s := range st.Services {
		out[s.Name] = s.Slots[0].Verdicts["udp"].Steered
	}
	return out
}

func TestDevices(t *testing.T) { eachEngine(t, testDevices) }

func testDevices(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	src := sources(3)
	for range 5 {
		ask(t, "udp", src[0], loopback4)
	}
	ask(t, "tcp", src[1], loopback4)
	ask(t, "udp", src[2], loopback4)
	ask(t, "tcp", src[2], loopback4)
	devices, problem, err := w.state().Devices(w.root)
	if err != nil || problem != nil {
		t.Fatal(err, problem)
	}
	got := map[netip.Addr]state.Device{}
	for _, d := range devices {
		got[d.Address] = d
	}
	if d := got[src[0]]; d.UDP != 5 || d.Connects != 0 || time.Since(d.LastUDP) > time.Minute || !d.LastTCP.IsZero() {
		t.Errorf("UDP device: %+v", d)
	}
	// Two are possible. A SYN from a port in TIME_WAIT of the other engine's world, refused here, is answered by an
	// ACK. It is sent again after 12 ms and looked up again.
	if d := got[src[1]]; d.UDP != 0 || d.Connects < 1 || d.Connects > 2 || !d.LastUDP.IsZero() {
		t.Errorf("TCP device: %+v", d)
	}
	now := time.Now()
	for f, want := range map[state.DeviceFilter]int{{}: 3, {Missing: "udp"}: 1, {Missing: "tcp"}: 1, {Silent: time.Hour}: 0} {
		n := 0
		for _, d := range devices {
			if f.Match(d, now) {
				n++
			}
		}
		if n != want {
			t.Errorf("filter %+v matches %d devices, want %d", f, n, want)
		}
	}
}

// TestOneProcessServesTwo puts one process in slots of two services. Both are withdrawn at its exit, regardless of the
// order of registrations.
func TestOneProcessServesTwo(t *testing.T) { eachEngine(t, testOneProcessServesTwo) }

func testOneProcessServesTwo(t *testing.T) {
	needExitHook(t)
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	v := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9992")
	both := startSink(t, "udp4=0.0.0.0:9991", "udp4=0.0.0.0:9992")
	both.do("orphan") // so only the exit withdraws
	w.member(0, both)
	v.member(0, both)
	second := v.cfg.Services[0]
	second.Name = "svc2"
	w.cfg.Services = append(w.cfg.Services, second)
	w.apply()
	other := startSink(t, "udp4=0.0.0.0:9991")
	w.member(0, other)
	w.apply()
	w.locked(func(l *kernel.WriteLock) error {
		m := w.cfg.Services[0].Members[0]
		_, err := engine.AdmitLocked(t.Context(), l, slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 0}, &m, nil)
		return err
	})
	to := netip.MustParseAddrPort("127.0.0.1:9992")
	if got := ask(t, "udp", sources(1)[0], to); got != fmt.Sprint(both.pid()) {
		t.Fatalf("before: %s", got)
	}
	both.kill()
	if got := ask(t, "udp", sources(1)[0], to); got != refused {
		t.Errorf("the second service of an exited process is answered by %s", got)
	}
	if got := ask(t, "udp", sources(1)[0], loopback4); got != fmt.Sprint(other.pid()) {
		t.Errorf("the slot that it had lost is answered by %s", got)
	}
}

// TestOverlapFoundWhenPlanned: two services with different names of one namespace cannot share packets.
func TestOverlapFoundWhenPlanned(t *testing.T) { eachEngine(t, testOverlapFoundWhenPlanned) }

func testOverlapFoundWhenPlanned(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	second := w.cfg.Services[0]
	second.Name, second.Netns = "second", "/proc/self/ns/net"
	w.cfg.Services = append(w.cfg.Services, second)
	if errs := w.cfg.Validate(); errs != nil {
		t.Fatal(errs)
	}
	_, err := Feature{}.Plan(t.Context(), state.State{}, w.cfg)
	if err == nil || !strings.Contains(err.Error(), "already belongs to service svc") {
		t.Errorf("planned: %v", err)
	}
}
