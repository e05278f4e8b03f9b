// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	gosync "sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"apply": runApply, "wake": runWake})
	nstest.Main(m)
}

// need skips the test on kernels without liveness' needs.
func need(t testing.TB) {
	t.Helper()
	nstest.NeedRoot(t)
	for _, n := range Needs(Config{Sessions: []Session{{Mode: Active}}}) {
		if err := n.Check(); err != nil && !n.Optional {
			t.Skip("need: kernel", err)
		}
	}
}

// pair is two routers with a wire between them, both with weir.
type pair struct {
	t    testing.TB
	w    *nstest.Wire
	root *kernel.Root
	key  string
}

var (
	functionA = netip.MustParseAddr("fc00:a::bf")
	functionB = netip.MustParseAddr("fc00:b::bf")
)

func newPair(t testing.TB) *pair {
	t.Helper()
	need(t)
	p := &pair{t: t, w: nstest.NewWire(t), root: kernel.OpenRoot(nstest.BPFFS + "/weir-" + strings.ReplaceAll(t.Name(), "/", "-")), key: newKey(t)}
	for _, ns := range []*netns.Handle{p.w.A, p.w.B} {
		forward(t, ns)
	}
	t.Cleanup(func() {
		l := p.lock()
		defer l.Unlock()
		if err := Remove(context.Background(), l); err != nil {
			t.Error(err)
		}
	})
	return p
}

func forward(t testing.TB, ns *netns.Handle) {
	t.Helper()
	inside(t, ns, func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	})
}

func newKey(t testing.TB) string {
	t.Helper()
	key := make([]byte, 16)
	rand.Read(key)
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, key, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func inside(t testing.TB, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

// sessions returns both ends of a session.
func (p *pair) sessions(interval time.Duration) (a, b Session) {
	a = Session{Name: "to-b", ID: 7, Mode: Active, Device: nstest.WireDevice, Peer: functionB, Via: p.w.B6, Source: p.w.A6, Function: functionA,
		Interval: interval, Multiplier: 3, KeyFile: p.key}
	b = a
	b.Name, b.Peer, b.Via, b.Source, b.Function = "to-a", functionA, p.w.A6, p.w.B6, functionB
	return a, b
}

func (p *pair) lock() *kernel.WriteLock {
	p.t.Helper()
	l, err := p.root.Lock(context.Background())
	if err != nil {
		p.t.Fatal(err)
	}
	return l
}

// apply configures a namespace and returns the plan's texts.
func (p *pair) apply(netns string, sessions ...Session) []string {
	p.t.Helper()
	said, err := applyTo(p.root, Config{Netns: netns, Sessions: sessions})
	if err != nil {
		p.t.Fatal(err)
	}
	return said
}

func applyTo(root *kernel.Root, c Config) (said []string, err error) {
	ctx := context.Background()
	return featuretest.ApplyPlan(ctx, root, Recover, func() (feature.Plan, error) {
		st, err := ReadState(ctx, root)
		if err != nil {
			return feature.Plan{}, err
		}
		return Plan(ctx, st, c)
	})
}

func (p *pair) state() State {
	p.t.Helper()
	st, err := ReadState(context.Background(), p.root)
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

// patience is the time for a change, on a machine that may stall for seconds. Each stall restarts the time without
// failure before up.
const patience = 60 * time.Second

// within waits for a condition on both sessions.
func (p *pair) within(limit time.Duration, what string, ok func(a, b SessionState) bool) (a, b SessionState) {
	p.t.Helper()
	nstest.Within(p.t, limit, func() error {
		st := p.state()
		sa, sb := st.session("to-b"), st.session("to-a")
		if sa == nil || sb == nil || !ok(*sa, *sb) {
			return fmt.Errorf("not yet: %s: %+v", what, st)
		}
		a, b = *sa, *sb
		return nil
	})
	return a, b
}

// words waits for the link states at both ends. A tick changes the phase before them.
func (p *pair) words(want links.Reason) {
	p.t.Helper()
	for _, ns := range []*netns.Handle{p.w.A, p.w.B} {
		nstest.Eventually(p.t, func() error {
			if p.word(ns, nstest.WireDevice).Reasons() != want {
				return fmt.Errorf("the data path reads %v, want %v", p.word(ns, nstest.WireDevice), want)
			}
			return nil
		})
	}
}

// flaps returns the number of down verdicts, and the longest stall of this host seen by loops with their packet.
func (p *pair) flaps(lost ...TimerLoopState) (flaps uint32, longest time.Duration) {
	p.t.Helper()
	st := p.state()
	for _, s := range st.Sessions {
		flaps += s.Flaps
	}
	for _, l := range st.TimerLoops {
		if !slices.ContainsFunc(lost, func(x TimerLoopState) bool { return x.Netns == l.Netns && x.CPU == l.CPU }) {
			longest = max(longest, l.Longest)
		}
	}
	return flaps, longest
}

// steady fails the test after a false alarm, unless this host stalled longer than weir tolerates (README.md). Loops
// that lost their packet are not evidence of a stall.
func (p *pair) steady(what string, lost ...TimerLoopState) {
	p.t.Helper()
	const ruledOut = 400 * time.Millisecond
	st := p.state()
	flaps, longest := p.flaps(lost...)
	if flaps != 0 && longest < ruledOut {
		p.t.Errorf("%s: a link that works was found to be down: %+v", what, st)
	} else if flaps != 0 {
		p.t.Logf("%s: a link that works was found to be down, and this host stood still for %v", what, longest)
	}
}

func bothUp(a, b SessionState) bool { return a.Phase == Up && b.Phase == Up }

// cut drops all packets arriving by a device of a namespace with XDP, or ends that.
func cut(t testing.TB, ns *netns.Handle, device string, on bool) {
	t.Helper()
	index := nstest.Ifindex(t, ns, device)
	at := fmt.Sprint(ns.Inode(), " ", index)
	if !on {
		if l, ok := cuts.LoadAndDelete(at); ok {
			if err := l.(kernel.Link).Close(); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1 /* XDP_DROP */), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	inside(t, ns, func() error {
		l, err := kernel.XDP{Ifindex: index, Device: device}.Attach(p)
		cuts.Store(at, l)
		return err
	})
}

var cuts gosync.Map // links by place

func addressOn(t testing.TB, ns *netns.Handle, device string, addr string) {
	t.Helper()
	ip, prefix, err := net.ParseCIDR(addr)
	if err != nil {
		t.Fatal(err)
	}
	prefix.IP = ip
	a, _ := netip.AddrFromSlice(ip)
	ones, _ := prefix.Mask.Size()
	nstest.Address(t, ns, device, netip.PrefixFrom(a, ones))
}

// session returns the session of a name, or nil.
func (st State) session(name string) *SessionState {
	i := slices.IndexFunc(st.Sessions, func(s SessionState) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &st.Sessions[i]
}
