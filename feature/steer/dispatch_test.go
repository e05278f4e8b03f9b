// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// here returns the namespace of the tests.
func here(t testing.TB) *netns.Handle {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// newDispatchWorld returns a world without configured services.
func newDispatchWorld(t testing.TB) *world {
	w := newWorld(t, spec.Options{Slots: 1})
	w.cfg.Services = nil
	return w
}

func binding(t testing.TB, text string) bindings.Binding {
	t.Helper()
	f := strings.Fields(text)
	var b bindings.Binding
	port, err := strconv.ParseUint(f[3], 10, 16)
	if err == nil {
		b.Prefix, err = bindings.ParsePrefix(f[2])
	}
	if err = errors.Join(err, b.Proto.UnmarshalText([]byte(f[1]))); err != nil {
		t.Fatal(err)
	}
	b.Service, b.Port = f[0], uint16(port)
	return b
}

func (w *world) bind(text string) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error { _, err := bindings.Bind(l, here(w.t), binding(w.t, text)); return err })
}

func (w *world) unbind(text string) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error { return bindings.Unbind(l, here(w.t), binding(w.t, text)) })
}

// register registers a sink's socket.
func (w *world) register(name string, s *sink, listen string) []string {
	w.t.Helper()
	at, err := service.ParseListen(listen)
	if err != nil {
		w.t.Fatal(err)
	}
	kinds, err := bindings.RegisterMember(context.Background(), w.root, name, "", service.Member{PID: s.pid()}, at)
	if err != nil {
		w.t.Fatal(err)
	}
	return kinds
}

func (w *world) unregister(name string, kinds ...string) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		_, err := bindings.UnregisterSockets(l, here(w.t), name, kinds...)
		return err
	})
}

func (w *world) named() map[string]bindings.Named {
	w.t.Helper()
	all, err := bindings.NamedServices(context.Background(), w.root, record.Scope(here(w.t)))
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string]bindings.Named{}
	for _, n := range all {
		out[n.Service] = n
	}
	return out
}

// reached checks the process that answers over TCP.
func (w *world) reached(want map[string]*sink) {
	w.t.Helper()
	for to, s := range want {
		who := refused
		if s != nil {
			who = fmt.Sprint(s.pid())
		}
		from := netip.MustParseAddr("127.0.0.1")
		at := netip.MustParseAddrPort(to)
		if at.Addr().Is6() {
			from = netip.IPv6Loopback()
		}
		if got := ask(w.t, "tcp", from, at); got != who {
			w.t.Errorf("%s is answered by %s, want %s", to, got, who)
		}
	}
}

// localRoute makes all addresses of a prefix local.
func localRoute(t testing.TB, prefix string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	p := netip.MustParsePrefix(prefix)
	r := &netlink.Route{LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST,
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
	if err := netlink.RouteAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
}

// TestDispatch: the longest prefix for the protocol and port decides, and that a port wins over every port.
func TestDispatch(t *testing.T) {
	w := newDispatchWorld(t)
	localRoute(t, "fd00:5::/64")
	a, b, c := startSink(t, "tcp4=127.0.0.1:7001", "udp4=127.0.0.1:7001"), startSink(t, "tcp4=127.0.0.1:7002"), startSink(t, "tcp6=[::1]:7003")
	w.bind("a tcp 127.20.0.0/16 80")
	w.reached(map[string]*sink{"127.20.0.1:80": nil}) // bound, but no socket is registered
	if got := w.register("a", a, "tcp 127.0.0.1:7001"); !slices.Equal(got, []string{"tcp4"}) {
		t.Errorf("registered for %v", got)
	}
	w.register("b", b, "tcp 127.0.0.1:7002")
	w.register("c", c, "tcp [::1]:7003")
	w.reached(map[string]*sink{"127.20.0.1:80": a, "127.20.0.1:81": nil, "127.21.0.1:80": nil, "127.0.0.1:7001": a})
	w.bind("b tcp 127.20.7.0/24 0")
	w.bind("b udp 127.20.9.0/24 80") // another protocol has no effect
	w.bind("b tcp 127.20.9.0/24 81") // another port has no effect
	w.bind("a tcp 127.20.7.0/24 443")
	w.bind("c tcp fd00:5::/64 0")
	w.reached(map[string]*sink{"127.20.0.1:80": a, "127.20.7.1:80": b, "127.20.7.1:8080": b, "127.20.7.1:443": a, "127.20.9.1:80": a,
		"127.20.9.1:81": b, "[fd00:5::7]:1": c, "[fd00:5::ffff]:65535": c, "127.20.7.1:7001": b})
	w.unbind("b tcp 127.20.7.0/24 0")
	w.reached(map[string]*sink{"127.20.7.1:80": a, "127.20.7.1:443": a, "127.20.7.1:8080": nil})
	w.bind("b tcp 127.20.0.0/16 80") // moves the binding
	w.reached(map[string]*sink{"127.20.0.1:80": b, "127.20.7.1:443": a})
	b.kill()
	w.reached(map[string]*sink{"127.20.0.1:80": nil, "127.20.7.1:443": a})
	n := w.named()
	if n["b"].Bindings != 3 || len(n["b"].Sockets) != 0 || n["b"].Steered == 0 || n["b"].Rejected == 0 {
		t.Errorf("b: %+v", n["b"])
	}
	if n["a"].Bindings != 1 || len(n["a"].Sockets) != 1 || n["a"].Sockets[0].Local.String() != "127.0.0.1:7001" {
		t.Errorf("a: %+v", n["a"])
	}
	b = startSink(t, "tcp4=127.0.0.1:7002")
	w.reached(map[string]*sink{"127.20.0.1:80": nil}) // until it is registered
	w.register("b", b, "tcp 127.0.0.1:7002")
	w.reached(map[string]*sink{"127.20.0.1:80": b})
	// UDP answers come from another address, so compare the counters.
	w.register("a", a, "udp 127.0.0.1:7001")
	w.bind("a udp 127.30.0.0/16 53")
	before := w.named()["a"].Steered
	c53, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.30.1.1:53")))
	if err != nil {
		t.Fatal(err)
	}
	defer c53.Close()
	if _, err := c53.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	nstest.Until(w.t, "the datagram is counted", func() bool { return w.named()["a"].Steered > before })
	w.unregister("a", "tcp4")
	w.reached(map[string]*sink{"127.20.7.1:443": nil, "127.20.0.1:80": b})
	all, err := bindings.Bindings(context.Background(), w.root, record.Scope(here(t)))
	if err != nil || len(all) != 6 {
		t.Errorf("%d bindings, %v: %v", len(all), err, all)
	}
	for _, x := range all {
		w.locked(func(l *kernel.WriteLock) error { return bindings.Unbind(l, here(t), x) })
	}
	for _, name := range []string{"a", "b", "c"} {
		w.unregister(name)
	}
	// With the last binding the program is removed, and the kernel chooses again.
	if all, err := w.root.Instances(spec.Name); err != nil || len(all) != 0 {
		t.Errorf("left: %v %v", all, err)
	}
	w.reached(map[string]*sink{"127.20.0.1:80": nil, "127.0.0.1:7001": a})
}

// TestDispatchDualStack: a dual-stack socket serves both families, unless an IPv4 socket is registered. v4-mapped
// prefixes are IPv4.
func TestDispatchDualStack(t *testing.T) {
	w := newDispatchWorld(t)
	localRoute(t, "fd00:5::/64")
	dual, four, six := startSink(t, "tcp=[::]:7011"), startSink(t, "tcp4=127.0.0.1:7012"), startSink(t, "tcp6=[::1]:7013")
	if got := w.register("x", dual, "tcp [::]:7011"); !slices.Equal(got, []string{"tcp4", "tcp6"}) {
		t.Errorf("registered for %v", got)
	}
	w.bind("x tcp ::ffff:127.20.0.0/112 80")
	w.bind("x tcp fd00:5::/64 80")
	both := map[string]*sink{"127.20.0.1:80": dual, "[fd00:5::1]:80": dual}
	w.reached(both)
	w.register("x", four, "tcp 127.0.0.1:7012")
	w.reached(map[string]*sink{"127.20.0.1:80": four, "[fd00:5::1]:80": dual})
	w.register("x", dual, "tcp [::]:7011") // registered again: IPv4 stays with the IPv4 socket
	w.reached(map[string]*sink{"127.20.0.1:80": four, "[fd00:5::1]:80": dual})
	w.register("x", six, "tcp [::1]:7013")
	w.reached(map[string]*sink{"127.20.0.1:80": four, "[fd00:5::1]:80": six})
	four.kill()
	w.reached(map[string]*sink{"127.20.0.1:80": nil, "[fd00:5::1]:80": six})
}

// TestDispatchToSlots checks bindings to the slots of a configured service. They stay when the service changes.
func TestDispatchToSlots(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	other := startSink(t, "tcp4=127.0.0.1:7021")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	w.bind("svc tcp 127.20.0.0/16 80")
	src := sources(20)
	bound := netip.MustParseAddrPort("127.20.1.1:80")
	check := func(want func(state.Assignment) string) {
		t.Helper()
		for _, p := range w.where(src...) {
			if got := ask(t, "tcp", p.Address, bound); got != want(p) {
				t.Errorf("from %s (slot %d): answered by %s, want %s", p.Address, p.Slot, got, want(p))
			}
		}
	}
	check(names(a, b))
	w.check(src, loopback4, names(a, b))
	// A service's listen wins over a binding of the same length, but not over a longer one.
	w.register("o", other, "tcp 127.0.0.1:7021")
	w.bind("o tcp 0.0.0.0/0 0")
	w.bind("o tcp 127.40.0.0/16 0")
	w.reached(map[string]*sink{"127.40.0.1:9991": other, "127.50.0.1:80": other})
	w.check(src, loopback4, names(a, b))
	w.locked(func(l *kernel.WriteLock) error {
		if _, err := bindings.Bind(l, here(t), binding(t, "o tcp 0.0.0.0/0 9991")); !errors.Is(err, bindings.ErrBound) {
			t.Errorf("binding what svc listens to: %v", err)
		}
		if _, err := bindings.Bind(l, here(t), binding(t, "svc tcp fd00::/64 1")); !errors.Is(err, bindings.ErrBinding) {
			t.Errorf("svc does not listen to IPv6: %v", err)
		}
		if _, err := bindings.RegisterSockets(l, here(t), []bindings.Registration{{Service: "svc", FD: 0}}); err == nil {
			t.Error("svc has slots, and takes a socket")
		}
		return nil
	})
	b.kill()
	check(names(a, nil))
	scope := record.Scope(here(t))
	for _, on := range []bool{true, false} {
		w.locked(func(l *kernel.WriteLock) error { _, err := engine.Bypass(l, scope, "svc", on); return err })
		if on { // the kernel's own choice: no socket listens there
			check(func(state.Assignment) string { return refused })
		}
	}
	check(names(a, nil))
	// Without the service its bindings stay and reject. When it returns, they lead to it again.
	svc := w.cfg.Services
	w.cfg.Services = nil
	w.apply()
	w.reached(map[string]*sink{"127.20.1.1:80": nil, "127.50.0.1:80": other})
	w.cfg.Services = svc
	w.cfg.Services[0].Members = w.cfg.Services[0].Members[:1]
	w.apply()
	check(names(a, nil))
}

// TestDispatchKeepsSelector: a reuseport group keeps its own program.
func TestDispatchKeepsSelector(t *testing.T) {
	w := newDispatchWorld(t)
	// Both sinks share a port. Their group's program always selects the second socket.
	a := startSink(t, "tcp4=127.0.0.1:7031")
	b := startSink(t, "tcp4=127.0.0.1:7031")
	w.register("g", a, "tcp 127.0.0.1:7031")
	w.bind("g tcp 127.20.0.0/16 80")
	at, err := service.ParseListen("tcp 127.0.0.1:7031")
	if err != nil {
		t.Fatal(err)
	}
	adopted, err := service.Member{PID: a.pid()}.Adopt(context.Background(), here(t), service.Spec{Name: "g", Listen: []service.Listen{at}})
	if err != nil {
		t.Fatal(err)
	}
	for chosen, s := range []*sink{a, b} {
		prog := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: uint32(chosen)}}
		err := unix.SetsockoptSockFprog(adopted.Sockets[0].FD, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF,
			&unix.SockFprog{Len: 1, Filter: &prog[0]})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			w.reached(map[string]*sink{fmt.Sprintf("127.20.0.%d:80", i+1): s})
		}
	}
	adopted.Close()
}

func TestRegisterRefuses(t *testing.T) {
	nstest.NeedRoot(t)
	w := newDispatchWorld(t)
	ns := here(t)
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	connected, err := net.DialUDP("udp4", nil, udp.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer connected.Close()
	unbound, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unbound)
	idle, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(idle)
	file, err := connected.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for fd, want := range map[int]string{int(file.Fd()): "connected", unbound: "not bound", idle: "does not listen", int(null.Fd()): "not a socket"} {
		w.locked(func(l *kernel.WriteLock) error {
			_, err := bindings.RegisterSockets(l, ns, []bindings.Registration{{Service: "x", FD: fd}})
			if !errors.Is(err, bindings.ErrSocket) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
			return nil
		})
	}
	if all, err := w.root.Instances(spec.Name); err != nil || len(all) != 0 {
		t.Errorf("left: %v %v", all, err)
	}
}

// TestDispatchExplained compares explain and status with the program.
func TestDispatchExplained(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "tcp 0.0.0.0:9991")
	a, b := startSink(t, "tcp4=0.0.0.0:9991"), startSink(t, "tcp4=127.0.0.1:7061")
	w.member(0, a)
	w.apply()
	w.bind("b tcp 127.20.0.0/16 80")
	w.bind("svc tcp 127.21.0.0/16 0")
	from := netip.MustParseAddrPort("127.0.0.1:40000")
	explain := func(to string) (text string, x *explain.Explanation) {
		t.Helper()
		x, err := explain.Explain(context.Background(), w.root, explain.Packet{Proto: "tcp", From: from, To: netip.MustParseAddrPort(to)})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range x.Steps {
			text += s.Step + ": " + s.Text + "\n"
		}
		return text + x.Result, x
	}
	want := func(to, part string, pid int) {
		t.Helper()
		if text, x := explain(to); !strings.Contains(text, part) || x.PID != pid {
			t.Errorf("%s: pid %d, want %d and %q:\n%s", to, x.PID, pid, part, text)
		}
	}
	want("127.20.0.1:80", "rejected until a socket is registered", 0)
	w.register("b", b, "tcp 127.0.0.1:7061")
	want("127.20.0.1:80", "tcp 127.20.0.0/16 is bound to b for port 80", b.pid())
	want("127.20.0.1:81", "none matches tcp to 127.20.0.1:81", 0)
	want("127.21.0.1:5", "tcp 127.21.0.0/16 is bound to svc for every port", a.pid())
	want("127.21.0.1:9991", "bound to svc", a.pid())
	w.bind("b tcp 0.0.0.0/0 0")
	want("127.22.0.1:9991", "listens on a prefix of at least this length", a.pid())
	st, err := state.Read(context.Background(), w.root)
	if err != nil || len(st.Bound) != 1 || st.Bound[0].Bindings != 3 || st.Bound[0].Room != engine.FewestBindings {
		t.Errorf("%v %+v", err, st.Bound)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(newCollector(w.root))
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]float64{}
	for _, f := range all {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if l.GetName() == "service" && l.GetValue() == "b" {
					found[f.GetName()] += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	if found["weir_steer_bindings"] != 2 || found["weir_steer_registered_sockets"] != 1 {
		t.Errorf("metrics: %v", found)
	}
}
