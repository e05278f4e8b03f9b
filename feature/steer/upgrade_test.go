// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/kernel"
)

// otherObject makes this process a weir with another object of the same ABI.
func otherObject(n int) (restore func()) {
	was := _SteerBytes
	_SteerBytes = append(slices.Clone(was), make([]byte, n)...)
	return func() { _SteerBytes = was }
}

// runUpgrade upgrades everything and dies at a step: ROOT STEP BYTES KIND, where
// BYTES make it another object.
func runUpgrade(args []string) error {
	dieAt, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	otherObject(n)
	if args[3] == "twostep" {
		kernel.WithoutExchange()
	}
	at := 0
	onSteps(func(step string) {
		if at++; at > dieAt {
			fmt.Println(step)
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	l, err := kernel.OpenRoot(args[0]).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	return upgradeAll(l)
}

// onSteps calls hook at every step but those that are like the one before: the
// tests of kernel go through each pin.
func onSteps(hook func(step string)) {
	last := ""
	kernel.OnStep(func(step string) {
		kind, _, _ := strings.Cut(step, "_")
		if kind != last {
			hook(step)
		}
		last = kind
	})
}

func upgradeAll(l *kernel.WriteLock) error {
	plan, err := Feature{}.PlanUpgrade(context.Background(), l.Root)
	if err != nil {
		return err
	}
	return Feature{}.Apply(context.Background(), l, plan)
}

// killedUpgrade upgrades in a process that is killed after so many steps. It
// returns the step at which it was, "" if it had finished.
func (w *world) killedUpgrade(steps, object int, kind string) string {
	w.t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=upgrade %s %d %d %s", childEnv, w.root.Path(), steps, object, kind))
	out, err := c.CombinedOutput()
	if err == nil {
		return ""
	}
	if ws, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() {
		w.t.Fatalf("the command failed instead of being killed: %v\n%s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// asked waits until so many more questions have been answered.
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
	for end := time.Now().Add(60 * time.Second); count() < first+more; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("only %d questions of %d were answered in a minute", count()-first, more)
		}
	}
}

// twoMembers is a world with a service whose two slots have their members.
func twoMembers(t testing.TB, older bool) (w *world, a, b *sink) {
	t.Helper()
	a = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	return newUpgradeWorld(t, older, a, b), a, b
}

func newUpgradeWorld(t testing.TB, older bool, a, b *sink) *world {
	seed := uint32(7)
	w := newWorld(t, Options{Slots: 2, Seed: &seed}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	if older {
		w.applyABI1()
	} else {
		w.apply()
	}
	return w
}

// An upgrade, killed at every step under traffic: every packet met the old
// program or the new one and the same member, counts and devices go on, and the
// next command finishes.
func TestUpgradeKilledAtEveryStep(t *testing.T) {
	for _, from := range []string{"abi1", "object"} {
		for _, kind := range []string{"exchange", "twostep"} {
			if from == "object" && kind == "twostep" {
				continue // what differs is kernel's, and tested there
			}
			t.Run(from+"/"+kind, func(t *testing.T) {
				a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
				b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
				var steps []string
				for n := 0; ; n += stride() {
					step := oneKilledUpgrade(t, from, kind, n, a, b)
					if step == "" {
						break
					}
					steps = append(steps, step)
				}
				t.Log("killed at", strings.Join(steps, ", "))
				if stride() > 1 {
					return
				}
				want := []string{"upgrade:staged", "upgrade:swapped", "steer:slots copied", "steer:upgraded"}
				if from == "abi1" {
					want = append(want, "steer:republished")
				}
				for _, w := range want {
					if !slices.Contains(steps, w) {
						t.Errorf("was never killed at %s", w)
					}
				}
			})
		}
	}
}

func oneKilledUpgrade(t *testing.T, from, kind string, n int, a, b *sink) string {
	t.Helper()
	w := newUpgradeWorld(t, from == "abi1", a, b)
	expected := w.expected(12)
	tr := w.startTraffic(12)
	tr.asked(t, 5)
	object := 0
	if from == "object" {
		object = 1
	}
	step := w.killedUpgrade(n, object, kind)
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
		t.Errorf("%s: after mending, apply would %v", where, again)
	}
	if st, err := ReadState(t.Context(), w.root); err != nil || len(st.Outdated) != 0 {
		t.Errorf("%s: still outdated: %v, %v", where, st.Outdated, err)
	}
	w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
	return step
}

// checkCounts sees that every question was counted once, as steered, and as its
// source's. A few more may be: late segments and ICMP errors are looked up too.
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
	if steered < sent || steered > sent+5 || other != 0 {
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

// Pins of ABI 1 are read as they are, without a change to them.
func TestReadABI1(t *testing.T) {
	w, a, b := twoMembers(t, true)
	src := sources(20)
	w.check(src, loopback4, names(a, b)) // steered by the program of that weir
	before := pinIDs(t, w.root)
	st := w.state()
	if len(st.Slots) != 2 || !st.Slots[0].Admitted() || st.Slots[0].PID != a.pid() || st.Slots[1].PID != b.pid() || st.Seed != 7 || st.Problem != "" {
		t.Errorf("state: %+v", st)
	}
	if n := st.Slots[0].Verdicts["udp"].Steered + st.Slots[1].Verdicts["udp"].Steered; n < 20 || n > 25 {
		t.Errorf("%d datagrams are counted, 20 were sent", n)
	}
	if d, problem, err := st.Devices(w.root); err != nil || problem != nil || len(d) != 20 {
		t.Errorf("devices: %d, %v, %v", len(d), problem, err)
	}
	r, err := OpenSlots(w.root, "", "svc")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if pid, ok, err := r.Admitted(1); pid != b.pid() || !ok || err != nil {
		t.Errorf("slot 1 is of process %d, %v, %v", pid, ok, err)
	}
	metrics := make(chan prometheus.Metric, 1000)
	NewCollector(w.root).Collect(metrics)
	close(metrics)
	admitted := 0
	for m := range metrics {
		if m.Desc() == admittedDesc {
			admitted++
		}
	}
	if admitted != 2 {
		t.Errorf("metrics of %d slots", admitted)
	}
	all, err := ReadState(t.Context(), w.root)
	if err != nil || len(all.Outdated) != 1 {
		t.Fatalf("outdated: %v, %v", all.Outdated, err)
	}
	if o := all.Outdated[0].String(); !strings.Contains(o, "ABI 1 → 2, weir abi1 → devel") {
		t.Errorf("the upgrade is described as %q", o)
	}
	if findings, err := Examine(t.Context(), w.root); err != nil || len(findings) != 1 || !strings.Contains(findings[0].Remedy, "weir upgrade") {
		t.Errorf("doctor finds %v, %v", findings, err)
	}
	w.locked(Mend) // leaves them to the upgrade
	if after := pinIDs(t, w.root); !slices.Equal(before, after) {
		t.Errorf("reading changed the pins from\n%v\nto\n%v", before, after)
	}
	w.check(src, loopback4, names(a, b))
	plan := w.apply()
	if len(plan) != 1 || !strings.HasPrefix(plan[0], "upgrade engine sk_lookup of net:[") {
		t.Errorf("apply did %v", plan)
	}
	w.check(src, loopback4, names(a, b))
	if pid, ok, err := r.Admitted(1); pid != b.pid() || !ok || err != nil {
		t.Errorf("after the upgrade slot 1 is of process %d, %v, %v", pid, ok, err)
	}
	b.kill()
	if _, ok, err := r.Admitted(1); ok || err != nil {
		t.Errorf("a reader that was open before the upgrade sees slot 1 admitted: %v, %v", ok, err)
	}
}

// pinIDs lists the pins with the kernel's numbers of what is pinned.
func pinIDs(t testing.TB, r *kernel.Root) []string {
	t.Helper()
	var out []string
	files, err := filepath.Glob(r.Path() + "/*/*/*/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasPrefix(filepath.Base(f), "link_") {
			ln, err := link.LoadPinnedLink(f, nil)
			if err != nil {
				t.Fatal(err)
			}
			info, err := ln.Info()
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, fmt.Sprint(f, " link ", info.ID, " program ", info.Program))
			ln.Close()
			continue
		}
		m, err := ebpf.LoadPinnedMap(f, nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		out = append(out, fmt.Sprint(f, " map ", id))
		m.Close()
	}
	return out
}

// Commands that write find pins of ABI 1 and upgrade them first.
func TestWritersUpgradeABI1(t *testing.T) {
	for name, write := range map[string]func(w *world, l *kernel.WriteLock) error{
		"register": func(w *world, l *kernel.WriteLock) error {
			changed, err := Register(w.t.Context(), l, Slot{Scope: w.state().Scope(), Service: "svc", Slot: 1}, nil)
			if changed {
				w.t.Error("the slot was given anew to who had it")
			}
			return err
		},
		"unregister and register": func(w *world, l *kernel.WriteLock) error {
			s := Slot{Scope: w.state().Scope(), Service: "svc", Slot: 1}
			if err := Unregister(l, s); err != nil {
				return err
			}
			_, err := Register(w.t.Context(), l, s, nil)
			return err
		},
		"upgrade": func(_ *world, l *kernel.WriteLock) error { return upgradeAll(l) },
	} {
		t.Run(name, func(t *testing.T) {
			w, a, b := twoMembers(t, true)
			w.check(sources(10), loopback4, names(a, b))
			w.locked(func(l *kernel.WriteLock) error { return write(w, l) })
			if st, err := ReadState(t.Context(), w.root); err != nil || len(st.Outdated) != 0 {
				t.Errorf("outdated: %v, %v", st.Outdated, err)
			}
			w.check(sources(20), loopback4, names(a, b))
			a.kill()
			w.check(sources(20), loopback4, names(nil, b))
			if again := w.apply(); len(again) != 1 || !strings.HasPrefix(again[0], "adopt slot 0") {
				t.Errorf("apply would %v", again)
			}
		})
	}
	t.Run("remove", func(t *testing.T) {
		w, a, _ := twoMembers(t, true)
		a.kill()
		w.cfg.Services = nil
		w.apply()
		if _, err := os.Stat(w.root.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pins left: %v", err)
		}
	})
}

// Two services, of which one shares its rows' numbers with nobody's habits: a
// table of ABI 1 and its rows survive, so that no device moves.
func TestUpgradeKeepsTables(t *testing.T) {
	seed := uint32(11)
	w := newWorld(t, Options{Slots: 3, Seed: &seed}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	v := newWorld(t, Options{Slots: 5, Seed: &seed, OnEmpty: Next}, "udp 0.0.0.0:9992")
	second := v.cfg.Services[0]
	second.Name = "second"
	w.cfg.Services = append(w.cfg.Services, second)
	w.applyABI1()
	was := w.tables()
	if fmt.Sprint(was["svc"]) == fmt.Sprint(Assign(3)) {
		t.Error("the table is the one that this weir would make: the test shows nothing")
	}
	plan := w.apply()
	if len(plan) != 1 || !strings.HasPrefix(plan[0], "upgrade ") {
		t.Errorf("apply did %v", plan)
	}
	for name, now := range w.tables() {
		if fmt.Sprint(was[name]) != fmt.Sprint(now) {
			t.Errorf("table and rows of %s changed", name)
		}
	}
}

func (w *world) tables() map[string][]any {
	w.t.Helper()
	st, err := ReadState(w.t.Context(), w.root)
	if err != nil || len(st.Services) != 2 {
		w.t.Fatal(st, err)
	}
	out := map[string][]any{}
	for _, s := range st.Services {
		out[s.Name] = []any{s.table, s.pub.Rows, s.pub.ID, s.Seed, s.OnEmpty}
	}
	return out
}

// A member that exits while programs change places, at whatever step, has no slot
// afterwards, though a child holds on to its sockets.
func TestExitDuringUpgrade(t *testing.T) {
	needExitHook(t)
	for n := 0; ; n += stride() {
		w, a, b := twoMembers(t, true)
		a.do("orphan")
		at := 0
		onSteps(func(string) {
			if at == n {
				a.kill()
			}
			at++
		})
		w.locked(upgradeAll)
		kernel.OnStep(nil)
		if at <= n {
			a.kill()
		}
		w.check(sources(6), loopback4, names(nil, b))
		w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
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

// Pins of a newer ABI are refused by every command, and not touched.
func TestNewerABI(t *testing.T) {
	w, a, b := twoMembers(t, false)
	scope := w.state().Scope()
	for _, instance := range []kernel.Instance{serviceInstance(scope, "svc"), engineInstance(scope)} {
		t.Run(instance.Name, func(t *testing.T) {
			restore := w.newer(instance)
			defer restore()
			before := pinIDs(t, w.root)
			writes := func(f func(l *kernel.WriteLock) error) error {
				l, err := w.root.Lock(t.Context())
				if err != nil {
					return err
				}
				defer l.Unlock()
				return f(l)
			}
			_, read := ReadState(t.Context(), w.root)
			for what, err := range map[string]error{
				"status": read,
				"register": writes(func(l *kernel.WriteLock) error {
					_, err := Register(t.Context(), l, Slot{Scope: scope, Service: "svc", Slot: 0}, nil)
					return err
				}),
				"upgrade": writes(func(l *kernel.WriteLock) error { return Upgrade(l, scope) }),
				"mend":    writes(Mend),
				"remove":  writes(func(l *kernel.WriteLock) error { return RemoveService(l, scope, "svc") }),
			} {
				if !errors.Is(err, kernel.ErrABI) || !strings.Contains(err.Error(), "made by weir v9.9.9") {
					t.Errorf("%s: %v", what, err)
				}
			}
			if after := pinIDs(t, w.root); !slices.Equal(before, after) {
				t.Errorf("changed the pins from\n%v\nto\n%v", before, after)
			}
			w.checkAnswers(sources(8), a, b)
		})
	}
}

// newer publishes an instance once more as a weir of the future would have.
func (w *world) newer(i kernel.Instance) (restore func()) {
	w.t.Helper()
	again := func(change func(m *kernel.Meta)) {
		w.locked(func(l *kernel.WriteLock) error {
			o, err := l.Open(i)
			if err != nil {
				return err
			}
			defer o.Close()
			meta := o.Meta
			change(&meta)
			pins := kernel.Pins{Maps: o.Maps, Links: map[string]kernel.Link{}}
			links, err := o.Links()
			if err != nil {
				return err
			}
			for _, name := range links {
				ln, err := o.Link(name)
				if err != nil {
					return err
				}
				defer ln.Close()
				pins.Links[name] = ln
			}
			return l.Publish(i, meta, pins)
		})
	}
	again(func(m *kernel.Meta) { m.ABI, m.Version = ABI+1, "v9.9.9" })
	return func() { again(func(m *kernel.Meta) { m.ABI, m.Version = ABI, Version }) }
}

// checkAnswers is check without a look at the pins: each of the two answers its
// own sources over both protocols.
func (w *world) checkAnswers(addrs []netip.Addr, a, b *sink) {
	w.t.Helper()
	for _, addr := range addrs {
		udp, tcp := ask(w.t, "udp", addr, loopback4), ask(w.t, "tcp", addr, loopback4)
		if udp != tcp || udp != fmt.Sprint(a.pid()) && udp != fmt.Sprint(b.pid()) {
			w.t.Errorf("%s is answered by %s over UDP and %s over TCP", addr, udp, tcp)
		}
	}
}

// A hundred upgrades leave no descriptor, pin, program or map behind.
func TestUpgradesLeakNothing(t *testing.T) {
	w, a, b := twoMembers(t, false)
	times := 100
	if testing.Short() { // a slow machine
		times = 10
	}
	upgrade := func(n int) {
		defer otherObject(n)()
		w.locked(upgradeAll)
	}
	upgrade(1)
	pins, fds := pinNames(t, w), descriptors(t)
	verdicts := w.mapID("verdicts")
	for n := range times {
		upgrade(2 + n%2)
	}
	if now := pinNames(t, w); !slices.Equal(now, pins) {
		t.Errorf("pins were\n%v\nand are\n%v", pins, now)
	}
	if now := descriptors(t); now != fds {
		t.Errorf("%d descriptors were open, %d are", fds, now)
	}
	if now := w.mapID("verdicts"); now != verdicts {
		t.Errorf("maps of the same layout were not kept")
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		programs := programsWith(t, verdicts)
		if programs == 1 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("%d programs use the counters", programs)
			break
		}
	}
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
		o, err := l.Open(engineInstance(w.state().Scope()), name)
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
			continue // gone meanwhile
		}
		if info, err := p.Info(); err == nil {
			if ids, _ := info.MapIDs(); slices.Contains(ids, m) {
				n++
			}
		}
		p.Close()
	}
}

// Upgrades, registrations and killed commands at once wait for one another.
func TestUpgradesAtOnce(t *testing.T) {
	w, a, b := twoMembers(t, true)
	expected := w.expected(12)
	tr := w.startTraffic(12)
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for n := range 4 {
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

// The holder of the older weir ends with its pins: another takes its place.
func TestUpgradeReplacesTheHolder(t *testing.T) {
	seed := uint32(7)
	w := newWorld(t, Options{Slots: 1, Seed: &seed, OnEmpty: Drop}, "udp 0.0.0.0:9991")
	w.applyABI1()
	var was [sinks]uint64
	w.withSinks(func(e *engine) {
		if err := e.startHolder(); err != nil {
			t.Error(err)
		}
		was = sinkCookies(e.pins)
	})
	w.locked(upgradeAll)
	w.withSinks(func(e *engine) {
		for i, now := range sinkCookies(e.pins) {
			if now == 0 && was[i] != 0 || now != 0 && now == was[i] {
				t.Errorf("socket %d that swallows was %d and is %d", i, was[i], now)
			}
		}
	})
	if p := w.state().Problem; p != "" {
		t.Errorf("afterwards: %s", p)
	}
}

func (w *world) withSinks(f func(e *engine)) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		scope := w.state().Scope()
		o, err := l.Open(engineInstance(scope), "sinks")
		if err != nil {
			return err
		}
		defer o.Close()
		f(&engine{lock: l, scope: scope, pins: o})
		return nil
	})
}
