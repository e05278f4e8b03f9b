// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// otherObject makes this process a weir with another object of the same ABI.
func otherObject(n int) (restore func()) {
	lookup, reuse := bpf.SteerObject, bpf.ReuseObject
	bpf.SteerObject = append(slices.Clone(lookup), make([]byte, n)...)
	bpf.ReuseObject = append(slices.Clone(reuse), make([]byte, n)...)
	return func() { bpf.SteerObject, bpf.ReuseObject = lookup, reuse }
}

// runUpgrade upgrades everything and exits at a step: ROOT STEP BYTES KIND. STEP is a number or a prefix of its name.
// BYTES selects a different object.
func runUpgrade(args []string) error {
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	otherObject(n)
	if args[3] == "twostep" {
		kerneltest.WithoutExchange()
	}
	kerneltest.DieAtKind(args[1])
	l, err := kernel.OpenRoot(args[0]).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := engine.Recover(l); err != nil {
		return err
	}
	return upgradeAll(l)
}

func upgradeAll(l *kernel.WriteLock) error {
	plan, err := Feature{}.PlanUpgrade(context.Background(), l.Root)
	if err != nil {
		return err
	}
	return plan.Apply(context.Background(), l, nil)
}

// killedUpgrade upgrades in a process killed at the given step: a number or a prefix of its name. It returns the step's
// name, or "" if the process finished first.
func (w *world) killedUpgrade(at any, object int, kind string) string {
	w.t.Helper()
	return kerneltest.Killed(w.t, nstest.Child("upgrade", w.root.Path(), at, object, kind))
}

// fewer is stride for upgrades. Their steps load the program three times, and an emulated machine verifies it slowly.
func fewer() int {
	if testing.Short() {
		return 11
	}
	return nstest.Stride(3)
}

// asked waits for the given number of further answers.
func (tr *traffic) asked(t testing.TB, more int) {
	t.Helper()
	count := func() (n int) {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		for _, answers := range tr.seen {
			for _, c := range answers {
				n += c
			}
		}
		return n
	}
	first := count()
	nstest.Eventually(t, func() error {
		if count() < first+more {
			return fmt.Errorf("only %d questions of %d were answered", count()-first, more)
		}
		return nil
	})
}

// twoMembers returns a service with two slots and their members.
func twoMembers(t testing.TB) (w *world, a, b *sink) {
	t.Helper()
	a = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	return newUpgradeWorld(t, a, b), a, b
}

func newUpgradeWorld(t testing.TB, a, b *sink) *world {
	seed := uint32(7)
	w := newWorld(t, spec.Options{Slots: 2, Seed: &seed}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	return w
}

// TestUpgradeKilledAtEveryStep kills an upgrade at every step, under traffic. Every packet sees the old or the new
// program and the same member. Counters and devices continue, and the next command finishes.
func TestUpgradeKilledAtEveryStep(t *testing.T) {
	for _, c := range []struct {
		kind   string
		engine spec.Engine
	}{
		{"exchange", spec.EngineSkLookup},
		{"twostep", spec.EngineSkLookup},
		{"exchange", spec.EngineReuseport},
	} {
		if testing.Short() && c.kind == "exchange" && c.engine == spec.EngineSkLookup {
			continue // on a slow machine each engine once, one of them in two steps
		}
		t.Run(fmt.Sprintf("%s/%s", c.kind, c.engine), func(t *testing.T) {
			underTest = c.engine
			defer func() { underTest = spec.EngineSkLookup }()
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			var steps []string
			for n := rand.IntN(fewer()); ; n += fewer() {
				step := oneKilledUpgrade(t, c.kind, n, a, b)
				if step == "" {
					break
				}
				steps = append(steps, step)
			}
			t.Log("killed at", strings.Join(steps, ", "))
			if fewer() > 1 {
				return
			}
			want := []string{"upgrade:staged", "upgrade:swapped", "steer:exit attached", "steer:upgraded"}
			if c.engine == spec.EngineReuseport {
				want = append(want, "upgrade:begun", "steer:group renewed")
			}
			for _, w := range want {
				if !slices.Contains(steps, w) {
					t.Errorf("was never killed at %s", w)
				}
			}
		})
	}
}

func oneKilledUpgrade(t *testing.T, kind string, n int, a, b *sink) string {
	t.Helper()
	w := newUpgradeWorld(t, a, b)
	expected := w.expected(12)
	tr := w.startTraffic(12)
	tr.asked(t, 5)
	step := w.killedUpgrade(n, 1, kind)
	where := fmt.Sprintf("killed at step %d (%s)", n, step)
	tr.asked(t, 20)
	w.apply() // the next command
	tr.asked(t, 20)
	seen := tr.end()
	for key, answers := range seen {
		for got, n := range answers {
			if got != expected[key] {
				t.Errorf("%s: %s answered %d times by %s, not by %s", where, key, n, got, expected[key])
			}
		}
	}
	w.checkCounts(where, seen)
	if again := w.apply(); len(again) != 0 {
		t.Errorf("%s: after recovery, apply would %v", where, again)
	}
	if st, err := state.Read(t.Context(), w.root); err != nil || len(st.Outdated) != 0 {
		t.Errorf("%s: still outdated: %v, %v", where, st.Outdated, err)
	}
	w.remove()
	return step
}

// checkCounts checks that every question was counted once, as steered and for its source. Repeated SYNs, late segments
// and ICMP errors are looked up too, so it tolerates a few more.
func (w *world) checkCounts(where string, seen map[string]map[string]int) {
	w.t.Helper()
	sent, udp := uint64(0), map[netip.Addr]uint64{}
	for key, answers := range seen {
		addr, proto, _ := strings.Cut(key, " ")
		for _, n := range answers {
			sent += uint64(n)
			if proto == "udp" {
				udp[netip.MustParseAddr(addr)] += uint64(n)
			}
		}
	}
	st := w.state()
	var steered, other uint64
	for _, slot := range st.Slots {
		for _, v := range slot.Verdicts {
			steered += v.Steered
			other += v.Rejected + v.Dropped + v.Passed + v.Diverted + v.Failed
		}
	}
	if steered < sent || steered > sent+sent/20+10 || other != 0 {
		w.t.Errorf("%s: asked %d times, counted %d steered and %d others", where, sent, steered, other)
	}
	devices, _, err := st.Devices(w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	got := map[netip.Addr]uint64{}
	for _, d := range devices {
		got[d.Address] = d.UDP
	}
	for addr, n := range udp {
		if got[addr] < n || got[addr] > n+5 {
			w.t.Errorf("%s: %s sent %d datagrams, its device counts %d", where, addr, n, got[addr])
		}
	}
}

// TestUpgradeKilledBetweenGroups kills an upgrade of engine sk_reuseport between two groups, because groups change one
// by one. The next command changes the rest.
func TestUpgradeKilledBetweenGroups(t *testing.T) {
	underTest = spec.EngineReuseport
	defer func() { underTest = spec.EngineSkLookup }()
	w, a, b := twoMembers(t)
	before := w.groupPrograms()
	if len(before) != 2 {
		t.Fatalf("%d groups, want one for UDP and one for TCP", len(before))
	}
	if step := w.killedUpgrade("steer:group", 1, "exchange"); step == "" {
		t.Fatal("was not killed between two groups")
	}
	changed := 0
	for k, id := range w.groupPrograms() {
		if id != before[k] {
			changed++
		}
	}
	if changed != 1 {
		t.Errorf("killed between two groups, and %d have gone over", changed)
	}
	w.checkAnswers(sources(12), a, b)
	if step := w.killedUpgrade(1000, 1, "exchange"); step != "" { // the next command of the same version
		t.Fatalf("killed at %s", step)
	}
	for k, id := range w.groupPrograms() {
		if id == before[k] {
			t.Errorf("%s still runs program %d", k, id)
		}
	}
	eventuallyGone(t, before)
	w.check(sources(12), loopback4, names(a, b))
}

func (w *world) groupPrograms() map[engine.GroupKey]ebpf.ProgramID {
	w.t.Helper()
	o, err := w.root.Open(record.EngineInstance(w.state().Scope(), spec.EngineReuseport), "groups")
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	groups, err := engine.Entries[engine.GroupKey, engine.GroupValue](o.Maps["groups"])
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[engine.GroupKey]ebpf.ProgramID{}
	for k, v := range groups {
		if k.Proto != 0 {
			out[k] = ebpf.ProgramID(v.Program)
		}
	}
	return out
}

// eventuallyGone waits until programs are detached everywhere and unloaded.
func eventuallyGone(t *testing.T, ids map[engine.GroupKey]ebpf.ProgramID) {
	t.Helper()
	nstest.Eventually(t, func() error {
		left := 0
		for _, id := range ids {
			if p, err := ebpf.NewProgramFromID(id); err == nil {
				left++
				p.Close()
			}
		}
		if left > 0 {
			return fmt.Errorf("%d programs of before are still there", left)
		}
		return nil
	})
}

// TestExitDuringUpgrade: a member that exits during an upgrade, at any step, loses its slot although a child keeps its
// sockets open.
func TestExitDuringUpgrade(t *testing.T) {
	needExitHook(t)
	for n := 0; ; n += fewer() {
		w, a, b := twoMembers(t)
		a.do("orphan")
		at := 0
		kerneltest.OnKind(func(string) {
			if at == n {
				a.kill()
			}
			at++
		})
		restore := otherObject(1)
		w.locked(upgradeAll)
		restore()
		kerneltest.OnStep(nil)
		if at <= n {
			a.kill()
		}
		w.check(sources(6), loopback4, names(nil, b))
		w.remove()
		a.endOrphan()
		b.kill()
		if at <= n {
			t.Logf("a member exited at each of %d steps", n)
			if n < 10 {
				t.Errorf("only %d steps", n)
			}
			return
		}
	}
}

// TestUpgradesLeakNothing upgrades repeatedly. No descriptor, pin, program or map remains.
func TestUpgradesLeakNothing(t *testing.T) { eachEngine(t, testUpgradesLeakNothing) }

func testUpgradesLeakNothing(t *testing.T) {
	w, a, b := twoMembers(t)
	times := 40
	if testing.Short() { // a slow machine
		times = 4
	}
	upgrade := func(n int) {
		defer otherObject(n)()
		w.locked(upgradeAll)
	}
	upgrade(1)
	pins, fds := pinNames(t, w), descriptors(t)
	verdicts := w.mapID("verdicts")
	groups := 1 // steer_lookup
	if underTest == spec.EngineReuseport {
		groups = 2 // one for UDP, one for TCP
	}
	for n := range times {
		upgrade(2 + n%2)
	}
	if now := pinNames(t, w); !slices.Equal(now, pins) {
		t.Errorf("pins were\n%v\nand are\n%v", pins, now)
	}
	if now := descriptors(t); now > fds { // previous tests may have left garbage to collect
		t.Errorf("%d descriptors were open, %d are", fds, now)
	}
	if now := w.mapID("verdicts"); now != verdicts {
		t.Errorf("maps of the same layout were not kept")
	}
	nstest.Eventually(t, func() error {
		if programs := programsWith(t, verdicts); programs != groups {
			return fmt.Errorf("%d programs use the counters, want %d", programs, groups)
		}
		return nil
	})
	w.check(sources(10), loopback4, names(a, b))
}

func pinNames(t testing.TB, w *world) []string {
	t.Helper()
	files, err := filepath.Glob(w.root.Path() + "/*/*/*/*")
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func descriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func (w *world) mapID(name string) (id ebpf.MapID) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		o, err := l.Open(record.EngineInstance(w.state().Scope(), w.state().Engine), name)
		if err != nil {
			return err
		}
		defer o.Close()
		info, err := o.Maps[name].Info()
		id, _ = info.ID()
		return err
	})
	return id
}

func programsWith(t testing.TB, m ebpf.MapID) (n int) {
	t.Helper()
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return n
		} else if err != nil {
			t.Fatal(err)
		}
		id = next
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // unloaded meanwhile
		}
		if info, err := p.Info(); err == nil {
			if ids, _ := info.MapIDs(); slices.Contains(ids, m) {
				n++
			}
		}
		p.Close()
	}
}

// TestUpgradesAtOnce: concurrent upgrades, registrations and killed commands wait for each other.
func TestUpgradesAtOnce(t *testing.T) {
	w, a, b := twoMembers(t)
	expected := w.expected(12)
	tr := w.startTraffic(12)
	times := 4
	if testing.Short() {
		times = 1
	}
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for n := range times {
				w.killedUpgrade([]int{1000, 7 + 5*n, 1000}[i], i, "exchange")
			}
		})
	}
	wg.Wait()
	w.apply()
	tr.asked(t, 20)
	for key, answers := range tr.end() {
		for got, n := range answers {
			if got != expected[key] {
				t.Errorf("%s answered %d times by %s, not by %s", key, n, got, expected[key])
			}
		}
	}
	if again := w.apply(); len(again) != 0 {
		t.Errorf("not settled: apply would %v", again)
	}
	w.check(sources(12), loopback4, names(a, b))
}
