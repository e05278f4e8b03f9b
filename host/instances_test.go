// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Offsets in a meta: docs/PINS.md.
const (
	metaABI    = 8
	metaCookie = 80
)

// patch changes the meta that is pinned in a directory.
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

// newer changes the ABI of an instance by that much.
func (w world) newer(who string, by uint32) {
	w.t.Helper()
	w.patch(w.dirOf(who), func(b []byte) {
		binary.NativeEndian.PutUint32(b[metaABI:], binary.NativeEndian.Uint32(b[metaABI:])+by)
	})
}

// An instance of a newer ABI is told of by everything that tells, and stays as it is. Nothing else is kept from being read,
// planned and changed.
func TestInstanceOfNewerABI(t *testing.T) {
	w, c, _ := damagedWorld(t)
	for _, who := range []string{"guard telemetry", "filter tcx", "filter nf", "reroute @liveness", "reroute @protect", "reroute @bfd"} {
		t.Run(who, func(t *testing.T) {
			w := w
			w.t = t
			w.newer(who, 1)
			defer w.newer(who, ^uint32(0))
			name := strings.Fields(who)[1]
			st, err := w.Reader("").Status(t.Context())
			if err != nil || st.Err() == nil || !strings.Contains(st.Err().Error(), name) {
				t.Fatalf("status: %v; unreadable: %v", err, st.Err())
			}
			p, err := w.Plan(t.Context(), c)
			if err != nil || len(p.Steps) > 0 || !slices.ContainsFunc(p.Warnings, func(s string) bool { return strings.Contains(s, "stays as it is") && strings.Contains(s, name) }) {
				t.Errorf("plan: %v, warnings %q, %v", p.Steps, p.Warnings, err)
			}
			if err := w.Apply(t.Context(), c, func(d Done) { t.Errorf("did %s", d.Step) }); !errors.Is(err, kernel.ErrABI) {
				t.Errorf("apply: %v, want ErrABI", err)
			}
			if d := w.Doctor(t.Context()); !slices.ContainsFunc(d.Findings, func(f Finding) bool { return f.Check == name && strings.Contains(f.Text, "cannot be read") }) {
				t.Errorf("doctor does not tell of %s", who)
			}
		})
	}
}

// The network namespace of all instances went, and another one has its inode number: none of them is opened there, and all are
// removed, those of other ABIs too.
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
