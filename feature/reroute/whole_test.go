// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// world is a triangle of routers with a host at each side: s – r1 – r2 – d, and r1 – r3 – r2. The link r1 – r2 is
// protected at both ends.
type world struct {
	testing.TB
	s, r1, r2, r3, d *netns.Handle
	name             map[*netns.Handle]string // names as in a configuration
	root             *kernel.Root
}

func newWorld(t testing.TB) *world {
	t.Helper()
	nstest.NeedRoot(t)
	for _, tool := range []string{"ip"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("need: tool", tool)
		}
	}
	if err := kernel.Require((Feature{}).Needs(Config{Paths: []Path{{Path: protect.Path{Repairs: []protect.Repair{{}}}, Probe: &Probe{}}}})); err != nil {
		t.Skip("need: kernel", err)
	}
	w := &world{TB: t, root: kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(t.Name(), "/", "_")), name: map[*netns.Handle]string{}}
	for _, n := range []**netns.Handle{&w.s, &w.r1, &w.r2, &w.r3, &w.d} {
		*n = nstest.NewNetns(t)
		w.in(*n, func() error {
			for _, v := range []string{"net/ipv6/conf/all/forwarding", "net/ipv6/conf/all/seg6_enabled", "net/ipv6/conf/default/seg6_enabled"} {
				if err := os.WriteFile("/proc/sys/"+v, []byte("1"), 0); err != nil {
					return err
				}
			}
			return nil
		})
		w.name[*n] = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), (*n).FD())
	}
	t.Cleanup(func() { w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) }) })
	w.cable(w.s, "out", w.r1, "in", "fd00:a::2/64", "fd00:a::1/64")
	w.cable(w.r1, "r12", w.r2, "r21", "fd00:12::1/64", "fd00:12::2/64")
	w.cable(w.r1, "r13", w.r3, "r31", "fd00:13::1/64", "fd00:13::3/64")
	w.cable(w.r3, "r32", w.r2, "r23", "fd00:32::3/64", "fd00:32::2/64")
	w.cable(w.r2, "out", w.d, "in", "fd00:d::1/64", "fd00:d::2/64")
	w.ip(w.s, "route add default via fd00:a::1")
	w.ip(w.d, "route add default via fd00:d::1")
	w.ip(w.r1, "route add fc00:2::/32 via fd00:12::2", "route add fc00:3::/32 via fd00:13::3", "route add fd00:d::/64 via fd00:12::2")
	w.ip(w.r2, "route add fc00:1::/32 via fd00:12::1", "route add fc00:3::/32 via fd00:32::3", "route add fd00:a::/64 via fd00:12::1",
		"route add fc00:2::d6/128 encap seg6local action End.DT6 table main dev r23")
	w.ip(w.r3, "route add fc00:1::/32 via fd00:13::1", "route add fc00:2::/32 via fd00:32::2", "route add fd00:d::/64 via fd00:32::2",
		"route add fd00:a::/64 via fd00:13::1", "route add fc00:3::e/128 encap seg6local action End dev r32")
	return w
}

func (w *world) in(ns *netns.Handle, f func() error) {
	w.Helper()
	if err := ns.Do(f); err != nil {
		w.Fatal(err)
	}
}

func (w *world) cable(a *netns.Handle, nameA string, b *netns.Handle, nameB, addrA, addrB string) {
	w.Helper()
	nstest.Cable(w, a, nameA, b, nameB)
	nstest.Address(w, a, nameA, netip.MustParsePrefix(addrA))
	nstest.Address(w, b, nameB, netip.MustParsePrefix(addrB))
}

func (w *world) ip(ns *netns.Handle, commands ...string) (out string) {
	w.Helper()
	for _, c := range commands {
		w.in(ns, func() error {
			b, err := exec.Command("ip", append([]string{"-6"}, strings.Fields(c)...)...).CombinedOutput()
			if out = string(b); err != nil {
				return fmt.Errorf("ip -6 %s: %w: %s", c, err, b)
			}
			return nil
		})
	}
	return out
}

func (w *world) locked(f func(*kernel.WriteLock) error) {
	w.Helper()
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	defer l.Unlock()
	if err := f(l); err != nil {
		w.Error(err)
	}
}

// parse parses a file.
func (w *world) parse(text string) Config {
	w.Helper()
	var file struct {
		Reroute []Path `yaml:"reroute"`
	}
	if err := strictyaml.Decode("weir.yaml", []byte(text), &file); err != nil {
		w.Fatal(err)
	}
	c := Config{Paths: file.Reroute}
	if errs := c.Validate(); len(errs) > 0 {
		w.Fatal(errors.Join(errs...))
	}
	return c
}

// apply applies a file and returns the steps.
func (w *world) apply(text string) (steps []string) {
	w.Helper()
	steps, err := featuretest.Apply(context.Background(), w.root, Feature{}, w.parse(text))
	if err != nil {
		w.Error(err)
	}
	return steps
}

// config protects the link at both ends, with probes.
func (w *world) config() string {
	w.Helper()
	key := w.key("sixteen octets..")
	return w.bothEnds("hold: 300ms\n    probe: {id: 7, peer: fc00:2::bf, via: fd00:12::2, source: fd00:12::1, function: fc00:1::bf, key_file: "+key+"}",
		"probe: {id: 7, peer: fc00:1::bf, via: fd00:12::1, source: fd00:12::2, function: fc00:2::bf, key_file: "+key+"}")
}

// key creates a file with a secret.
func (w *world) key(secret string) string {
	w.Helper()
	path := filepath.Join(w.TempDir(), "key")
	if err := os.WriteFile(path, []byte(secret), 0o600); err != nil {
		w.Fatal(err)
	}
	return path
}

// bothEnds returns a configuration protecting the link at both ends, each with its own judging lines.
func (w *world) bothEnds(there, back string) string {
	return fmt.Sprintf(`
reroute:
  - name: there
    netns: %s
    interface: r12
    repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: fd00:13::3}]
    %s
  - name: back
    netns: %s
    interface: r21
    prefix: fd00:a::/64
    repairs: [{interface: r23, via: fd00:32::3}]
    %s
`, w.name[w.r1], there, w.name[w.r2], back)
}

func (w *world) state() State {
	w.Helper()
	st, err := ReadState(context.Background(), w.root)
	if err != nil {
		w.Fatal(err)
	}
	return st
}

// links waits for a condition on the paths of both ends.
func (w *world) links(what string, ok func(p protect.PathState) bool) {
	w.Helper()
	w.eventually(what, func() bool {
		st := w.state()
		return len(st.Paths) == 2 && ok(st.Paths[0]) && ok(st.Paths[1])
	})
}

func (w *world) eventually(what string, f func() bool) {
	w.Helper()
	nstest.Eventually(w, func() error {
		if !f() {
			return fmt.Errorf("not yet: %s\n%+v", what, w.state())
		}
		return nil
	})
}

// cut drops all packets arriving by a device before other programs see them, until the returned link is closed.
func (w *world) cut(ns *netns.Handle, device string) link.Link {
	w.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}}) // TC_ACT_SHOT
	if err != nil {
		w.Fatal(err)
	}
	defer prog.Close()
	var l link.Link
	index := nstest.Ifindex(w, ns, device)
	w.in(ns, func() (err error) {
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { l.Close() })
	return l
}

// stream sends numbered datagrams from s to d, one per millisecond, and counts the returning ones.
type stream struct {
	sent, back atomic.Uint64
	stop       func()
}

func (w *world) stream() *stream {
	w.Helper()
	echo := nstest.ListenUDP(w, w.d, netip.MustParseAddrPort("[fd00:d::2]:9000"))
	go func() {
		b := make([]byte, 64)
		for {
			n, from, err := echo.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = echo.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	c := nstest.ListenUDP(w, w.s, netip.MustParseAddrPort("[fd00:a::2]:9001"))
	st := &stream{}
	ctx, cancel := context.WithCancel(context.Background())
	st.stop = cancel
	w.Cleanup(cancel)
	go func() {
		b := make([]byte, 64)
		for {
			if _, err := c.Read(b); err != nil {
				return
			}
			st.back.Add(1)
		}
	}()
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			<-tick.C
			n := st.sent.Add(1)
			_, _ = c.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, n), netip.MustParseAddrPort("[fd00:d::2]:9000"))
		}
	}()
	return st
}

// flows waits until traffic passes in both directions.
func (w *world) flows(s *stream) {
	w.Helper()
	before := s.back.Load()
	w.eventually("traffic passes", func() bool { return s.back.Load() > before+50 })
}

func TestWhole(t *testing.T) {
	w := newWorld(t)
	routes := w.ip(w.r1, "route show table all") + w.ip(w.r2, "route show table all")
	w.in(w.s, func() error { // neighbours that answered once
		c, err := net.DialTimeout("udp", "[fd00:d::2]:9", time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
	text := w.config()
	steps := w.apply(text)
	if len(steps) != 4 {
		t.Errorf("plan %q", steps)
	}
	if again := w.apply(text); len(again) != 0 {
		t.Errorf("applied again: %q", again)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var said nstest.Log
	go func() { ended <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(&said, nil))) }()
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	defer stop()
	up := func() bool {
		st := w.state()
		return len(st.Sessions) == 2 && st.Sessions[0].Phase == liveness.Up && st.Sessions[1].Phase == liveness.Up
	}
	w.eventually("both ends are up", up)
	s := w.stream()
	w.flows(s)
	used := func(p protect.PathState) bool { return p.Attached && !p.Down }
	w.links("the link is used", used)

	t.Run("silent cut", func(t *testing.T) {
		a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
		w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
		w.flows(s)
		for _, p := range w.state().Paths {
			if p.Counts.Packets == 0 {
				t.Errorf("%s: %+v", p.Name, p.Counts)
			}
		}
		for path, device := range map[string]string{"there": "r12", "back": "r21"} {
			w.eventually("it is told of "+path, func() bool {
				return said.Has(`level=WARN msg="link is down" session=`+path+" interface="+device, `paths="`+path+`: rerouted"`)
			})
		}
		a.Close()
		b.Close()
		w.links("the link is used again", used)
		w.eventually("both ends are up", up)
		w.eventually("it is told", func() bool { return said.Has(`level=INFO msg="link is up" session=there interface=r12`) })
		w.flows(s)
	})
	t.Run("one way", func(t *testing.T) {
		a := w.cut(w.r2, "r21")
		w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
		w.flows(s)
		// The direction depends on packets of the last few intervals. After a stall of this machine there are none.
		w.eventually("both ends know which way is cut", func() bool {
			return !slices.ContainsFunc(w.state().Sessions, func(x liveness.SessionState) bool {
				return x.Device == "r12" && x.Out != liveness.Broken || x.Device == "r21" && x.In != liveness.Broken
			})
		})
		a.Close()
		w.links("the link is used again", used)
	})
	t.Run("carrier", func(t *testing.T) {
		w.ip(w.r2, "link set r21 down")
		w.eventually("r1 sees it", func() bool { return w.state().Paths[0].Carrier || w.state().Paths[1].Carrier })
		w.ip(w.r2, "link set r21 up", "addr replace fd00:12::2/64 dev r21 nodad", "route replace fc00:1::/32 via fd00:12::1", "route replace fd00:a::/64 via fd00:12::1")
		w.links("the link is used again", used)
		w.eventually("both ends are up", up)
		w.flows(s)
	})
	t.Run("drain", func(t *testing.T) {
		w.locked(func(l *kernel.WriteLock) error { return Drain(l, "there") })
		drained := func() protect.PathState {
			st := w.state()
			for _, p := range st.Paths {
				if p.Name == "there" {
					return p
				}
			}
			return protect.PathState{}
		}
		before := drained().Counts.Packets
		w.flows(s)
		time.Sleep(300 * time.Millisecond) // the sessions need time to detect it
		// Probes leaving the link would never be answered; one may be late.
		w.eventually("a drained link is found to work, and is not used", func() bool {
			p := drained()
			return p.Drain && !p.Probe && p.Counts.Packets > before && up()
		})
		w.locked(func(l *kernel.WriteLock) error { return Undrain(l, "there") })
		w.links("the link is used again", used)
	})
	t.Run("without a process", func(t *testing.T) {
		stop()
		a := w.cut(w.r1, "r12")
		w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
		w.flows(s)
		a.Close()
		w.links("the link is used again", used)
	})
	families, err := registry(w.root).Gather()
	metrics := map[string]int{}
	for _, f := range families {
		metrics[f.GetName()] = len(f.GetMetric())
	}
	if err != nil || metrics["weir_reroute_session_up"] != 2 || metrics["weir_reroute_link_down"] != 6 {
		t.Errorf("metrics %v, %v", metrics, err)
	}
	w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
	w.flows(s)
	if after := w.ip(w.r1, "route show table all") + w.ip(w.r2, "route show table all"); sorted(after) != sorted(routes) {
		t.Errorf("routes before:\n%s\nand after:\n%s", routes, after)
	}
	if st := w.state(); len(st.Paths)+len(st.Sessions) != 0 {
		t.Errorf("%+v", st)
	}
}

func registry(r *kernel.Root) *prometheus.Registry {
	g := prometheus.NewPedanticRegistry()
	g.MustRegister(Feature{}.Collector(r))
	return g
}

// sorted sorts the routes of a text, without the kernel's own, which belong to addresses.
func sorted(text string) string {
	lines := slices.DeleteFunc(strings.Split(text, "\n"), func(l string) bool { return strings.Contains(l, "proto kernel") })
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
