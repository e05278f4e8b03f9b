// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Offsets in a meta: docs/PINS.md.
const (
	metaABI    = 8
	metaObject = 16
	metaCookie = 80
)

// patch changes the meta pinned in a directory.
func (w world) patch(dir string, change func(meta []byte)) {
	w.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, "meta"), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer m.Close()
	b, err := m.LookupBytes(uint32(0))
	if err == nil {
		change(b)
		err = m.Put(uint32(0), b)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// newer adds by to the ABI of an instance.
func (w world) newer(who string, by uint32) {
	w.t.Helper()
	w.patch(w.dirOf(who), func(b []byte) {
		binary.NativeEndian.PutUint32(b[metaABI:], binary.NativeEndian.Uint32(b[metaABI:])+by)
	})
}

// everyInstance lists instances of every feature by prefix.
var everyInstance = []string{"steer telemetry", "steer shared", "steer @lookup", "steer @reuse", "steer @bind", "guard telemetry", "guard @hooks", "filter tcx", "filter xdp", "filter nf",
	"reroute @liveness", "reroute @protect", "reroute @bfd", "handoff lb-lb", "handoff quarantine", "handoff keeper", "lb spec", "backend spec"}

// spoilt are the ways to make an instance unreadable. back undoes it.
var spoilt = map[string]func(w world, who string) (back func()){
	"newer ABI": func(w world, who string) func() {
		w.newer(who, 1)
		return func() { w.newer(who, ^uint32(0)) }
	},
	"newer ABI, half there": func(w world, who string) func() {
		w.newer(who, 1)
		var back []func()
		maps, _ := filepath.Glob(filepath.Join(w.dirOf(who), "map_*"))
		for _, path := range maps[:len(maps)/2] {
			back = append(back, w.unpin(path))
		}
		return func() {
			for _, f := range back {
				f()
			}
			w.newer(who, ^uint32(0))
		}
	},
}

// unpin removes the pin of a map. back pins it again, if it is still missing.
func (w world) unpin(path string) (back func()) {
	w.t.Helper()
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		err = m.Unpin() // so m can be pinned there again
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return func() {
		defer m.Close()
		if _, err := os.Stat(path); err == nil {
			return
		}
		if err := m.Pin(path); err != nil {
			w.t.Error(err)
		}
	}
}

// everyInstanceWorld is a host with everyInstance. other is its configuration with another limit, other rules, another
// key and another timeout of the keeper.
func everyInstanceWorld(t *testing.T) (w world, c, other *Config) {
	t.Helper()
	ca := peertest.NewAuthority(t)
	cert, key, root := ca.Files("s1")
	cert2, key2, _ := ca.Files("lb")
	text := everyFeature + fmt.Sprintf(sectionsOfHandoff, cert, key, root, cert2, key2, root)
	w, c, _, _ = damagedWorldOf(t, text, kernel.TCXLink, kernel.NetfilterLink)
	second := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(second, []byte("fedcba9876543210"), 0o600); err != nil {
		t.Fatal(err)
	}
	text = strings.NewReplacer("limit: 20kpps", "limit: 30kpps", "hold: 20s", "hold: 30s", "rules: [{match: 'udp.dstport == 9'", "rules: [{match: 'udp.dstport == 10'").Replace(text)
	return w, c, w.config(text, c.Services["telemetry"].Members[0].PID, c.Services["shared"].Members[0].PID, second)
}

// An unreadable instance is reported everywhere and stays unchanged. It does not affect reading, planning and changing
// others.
func TestUnreadableInstance(t *testing.T) {
	w, c, other := everyInstanceWorld(t)
	for i, who := range everyInstance {
		for how, spoil := range spoilt {
			if testing.Short() && how != "newer ABI" && i%3 != 0 {
				continue
			}
			t.Run(who+", "+how, func(t *testing.T) {
				w := w
				w.t = t
				defer spoil(w, who)()
				w.staysUnread(c, who)
				if how == "newer ABI" && !(testing.Short() && i%3 != 1) {
					w.changesBeside(c, other, who)
				}
			})
		}
	}
	if steps := w.apply(c); len(steps) > 0 {
		t.Errorf("all can be read again, and apply would %q", steps)
	}
}

// staysUnread checks that status, plan, apply and doctor report an unreadable instance.
func (w world) staysUnread(c *Config, who string) {
	t := w.t
	t.Helper()
	name := strings.Fields(who)[1]
	st, err := w.Reader("").Status(t.Context())
	if err != nil || st.Err() == nil || !strings.Contains(st.Err().Error(), name) {
		t.Fatalf("status: %v; unreadable: %v", err, st.Err())
	}
	p, err := w.Plan(t.Context(), c)
	steps := slices.DeleteFunc(p.Steps, func(s feature.Step) bool { return s.Verb == "recover" })
	if err != nil || len(steps) > 0 || !slices.ContainsFunc(p.Warnings, func(s string) bool {
		return strings.Contains(s, "stays as it is") && strings.Contains(s, strings.TrimPrefix(name, "@"))
	}) {
		t.Errorf("plan: %v, warnings %q, %v", steps, p.Warnings, err)
	}
	if d := w.Doctor(t.Context()); !slices.ContainsFunc(d.Findings, func(f Finding) bool { return f.Check == name && strings.Contains(f.Text, "cannot be read") }) {
		t.Errorf("doctor does not tell of %s: %+v", who, d.Findings)
	}
	if err := w.Apply(t.Context(), c, func(d Done) {
		if d.Step.Verb != "recover" {
			t.Errorf("did %s", d.Step)
		}
	}); !errors.Is(err, kernel.ErrABI) {
		t.Errorf("apply: %v, want ErrABI", err)
	}
}

// changesBeside checks that all other features change, and change back, beside an unreadable instance.
func (w world) changesBeside(c, other *Config, who string) {
	t := w.t
	t.Helper()
	for _, c := range []*Config{other, c} {
		did := map[string]bool{}
		err := w.Apply(t.Context(), c, func(d Done) {
			for _, f := range []string{"guard", "filter", "keeper"} {
				did[f] = did[f] || strings.Contains(d.Step.Object, f)
			}
		})
		if !errors.Is(err, kernel.ErrABI) {
			t.Errorf("apply of another configuration: %v, want ErrABI", err)
		}
		for _, f := range []string{"guard", "filter", "keeper"} {
			if !did[f] && !strings.Contains(who, f) {
				t.Errorf("%s did not change: %v, %v", f, did, err)
			}
		}
	}
}

// The network namespace of every feature disappears while weir serve runs. weir serve and everything else continue.
// Another namespace gets nothing of it, and the next command removes the remains.
func TestNetnsOfEveryFeatureGoesWhileServeRuns(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []kernel.Need{kernel.TCXLink, kernel.NetfilterLink, probe.CgroupIngress, probe.CompareAndSwap} {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd {
		holder := nstest.Child("hold", root, scope, kind)
		holders = append(holders, holder)
		return holder
	}
	t.Cleanup(func() { engine.SocketHolderCommand = nil })
	w := newWorld(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	const beside = "filter:\n  - {name: good, hook: netfilter, rules: [{match: 'udp.dstport == 9', action: drop}]}\n"
	c := w.config(strings.Replace(everyFeatureInBox, "filter:\n", beside, 1), key)
	was, err := attachedHere()
	if err != nil {
		t.Fatal(err)
	}
	s := w.serve()
	scope := fmt.Sprint(w.inBox(c))
	for _, f := range features {
		if _, err := f.State(t.Context(), w.Root); err != nil {
			t.Errorf("state of %s: %v", f.Name, err)
		}
	}
	if st, err := w.Reader("").Status(t.Context()); err != nil || st.Err() != nil {
		t.Errorf("status: %v, %v", err, st.Err())
	}
	if _, body := s.get("/metrics"); !strings.Contains(body, "weir_filter_up 1") {
		t.Error("metrics fail")
	}
	nstest.Eventually(t, func() error {
		st, err := w.Reader(s.socket).Status(t.Context())
		fs, _ := Part[filter.State](st, filter.Name)
		if err != nil || !slices.ContainsFunc(fs.Filters, func(f filter.FilterState) bool { return f.Name == "good" }) {
			return fmt.Errorf("status shows the filters %+v, %v", fs.Filters, err)
		}
		return nil
	})
	steps := w.apply(w.config("%s", strings.Replace(beside, "== 9", "== 10", 1)))
	if !slices.ContainsFunc(steps, func(s string) bool { return strings.Contains(s, "good") }) {
		t.Errorf("the filter beside does not change: %q", steps)
	}
	if left, _ := filepath.Glob(filepath.Join(w.Root.Path(), scope, "*", "*")); len(left) > 0 {
		t.Errorf("left of the namespace: %q", left)
	}
	if now, err := attachedHere(); err != nil || !slices.Equal(was, now) {
		t.Errorf("here: %s, %v", diff(strings.Join(was, "\n"), strings.Join(now, "\n")), err)
	}
	if err := s.stop(); err != nil {
		t.Error(err)
	}
}

// The network namespace of all instances is gone, and another one has its inode number. No instance is opened there, and
// all are removed, other ABIs included.
func TestInodeOfEveryFeatureIsReused(t *testing.T) {
	w, _, _ := damagedWorld(t)
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if ns.ID().Cookie == 0 {
		t.Skip("need: kernel: SO_NETNS_COOKIE (Linux 5.14)")
	}
	scope := kernel.ScopeOf(ns)
	w.newer("guard telemetry", 1)
	w.newer("filter xdp", 1)
	dirs, err := filepath.Glob(filepath.Join(w.Root.Path(), scope, "*", "*"))
	if err != nil || len(dirs) < len(damagedInstances) {
		t.Fatalf("instances %q, %v", dirs, err)
	}
	for _, dir := range dirs {
		w.patch(dir, func(b []byte) {
			binary.NativeEndian.PutUint64(b[metaCookie:], binary.NativeEndian.Uint64(b[metaCookie:])+1)
		})
	}
	for _, f := range features {
		if _, err := f.State(t.Context(), w.Root); err != nil {
			t.Errorf("state of %s: %v", f.Name, err)
		}
	}
	all, err := w.Root.Instances("")
	if i := slices.IndexFunc(all, func(i kernel.Instance) bool { return i.Scope == scope }); err != nil || i >= 0 {
		t.Fatalf("read: %v, %v", all, err)
	}
	w.sweep(t.Context(), slog.New(slog.DiscardHandler))
	if dirs, _ := filepath.Glob(filepath.Join(w.Root.Path(), scope, "*", "*")); len(dirs) > 0 {
		t.Errorf("left: %q", dirs)
	}
}
