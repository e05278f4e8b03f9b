// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// object identifies a map, program or link of the kernel. Ids are not reused.
type object struct {
	kind string
	id   uint32
}

// exists reports whether the kernel still has the object.
func (o object) exists() bool {
	var c interface{ Close() error }
	var err error
	switch o.kind {
	case "map":
		c, err = ebpf.NewMapFromID(ebpf.MapID(o.id))
	case "program":
		c, err = ebpf.NewProgramFromID(ebpf.ProgramID(o.id))
	default:
		c, err = link.NewFromID(link.ID(o.id))
	}
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	c.Close()
	return true
}

// objects returns the objects pinned below the world's root, and the programs of its links.
func (w *world) objects() []object {
	w.t.Helper()
	var all []object
	err := filepath.WalkDir(w.root.Path(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if strings.HasPrefix(d.Name(), "link_") {
			l, err := link.LoadPinnedLink(path, nil)
			if err != nil {
				return err
			}
			defer l.Close()
			info, err := l.Info()
			if err == nil {
				all = append(all, object{"link", uint32(info.ID)}, object{"program", uint32(info.Program)})
			}
			return err
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return err
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return err
		}
		id, ok := info.ID()
		if !ok {
			return fmt.Errorf("%s has no number", path)
		}
		all = append(all, object{"map", uint32(id)})
		return nil
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.t.Fatal(err)
	}
	return all
}

// usage is the use of resources that could leak.
type usage struct {
	descriptors, threads int
	heap                 int // bytes
	rss                  int // KiB
	pins                 int
	held                 int            // descriptors of the socket holder
	entries              map[string]int // of the shared maps
	memlock              map[string]int // bytes charged for the pinned maps
}

func (w *world) usage() usage {
	w.t.Helper()
	var m runtime.MemStats
	for range 2 { // objects with finalizers are freed the second time
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		w.t.Fatal(err)
	}
	u := usage{heap: int(m.HeapAlloc), descriptors: len(fds), threads: procStatus(w.t, "Threads:"), rss: procStatus(w.t, "VmRSS:"), pins: len(w.objects()),
		entries: map[string]int{}, memlock: map[string]int{}}
	o, err := w.root.Open(record.EngineInstance(w.state().Scope(), w.cfg.Services[0].Engine))
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	if h := w.holder(); h != 0 {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", h))
		if err != nil {
			w.t.Fatal(err)
		}
		u.held = len(fds)
	}
	for name, m := range o.Maps {
		if bytes, ok := memlock(w.t, m); ok {
			u.memlock[name] = bytes
		}
		if m.Type() == ebpf.Hash || m.Type() == ebpf.LPMTrie {
			var k, v []byte
			for it := m.Iterate(); it.Next(&k, &v); {
				u.entries[name]++
			}
		}
	}
	return u
}

// holder returns the PID of the socket holder, or 0.
func (w *world) holder() int {
	w.t.Helper()
	o, err := w.root.Open(record.EngineInstance(w.state().Scope(), w.cfg.Services[0].Engine))
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	var h engine.SocketHolderProcess
	if m := o.Maps["holder"]; m == nil {
		return 0
	} else if err := m.Lookup(uint32(0), &h); err != nil {
		w.t.Fatal(err)
	}
	return int(h.PID)
}

// procStatus returns a number of /proc/self/status.
func procStatus(t testing.TB, key string) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("/proc/self/status has no %s", key)
	return 0
}

// memlock returns the memory charged for a map.
func memlock(t testing.TB, m *ebpf.Map) (bytes int, ok bool) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "memlock:" {
			bytes, err = strconv.Atoi(f[1])
			return bytes, err == nil
		}
	}
	return 0, false
}

// more describes the growth between two readings beyond the tolerances.
func (before usage) more(after usage) string {
	var grown []string
	check := func(what string, before, after, most int) {
		if after > before+most {
			grown = append(grown, fmt.Sprintf("%s from %d to %d", what, before, after))
		}
	}
	check("descriptors", before.descriptors, after.descriptors, 0)
	check("descriptors of the holder", before.held, after.held, 0)
	check("pinned objects", before.pins, after.pins, 0)
	check("threads", before.threads, after.threads, 12) // the runtime starts some at any time
	check("bytes of heap", before.heap, after.heap, 300<<10)
	check("KiB in memory", before.rss, after.rss, 8<<10)
	for name := range after.entries {
		check("entries of map "+name, before.entries[name], after.entries[name], 0)
	}
	for name := range after.memlock {
		check("bytes of map "+name, before.memlock[name], after.memlock[name], 0)
	}
	return strings.Join(grown, ", ")
}

// TestThousandRegistrationsLeakNothing registers and removes slots and services a thousand times, beside a watcher. No
// descriptor, thread, pin, map entry or memory leaks, and finally no kernel object remains.
func TestThousandRegistrationsLeakNothing(t *testing.T) {
	times := 1000
	if testing.Short() { // lookups in a map of maps wait for a grace period on some kernels
		times = 60
	}
	eachEngine(t, func(t *testing.T) {
		times := times
		if underTest == spec.EngineReuseport { // each reads the programs of all groups, about 80 ms
			times /= 5
		}
		// The template keeper would open its resources at an arbitrary time, so disable it.
		w := newWorld(t, spec.Options{Slots: 2, Templates: spec.TemplatesOff}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
		w.apply()
		w.serve()
		r := newRegistrations(w)
		r.run(max(40, times/5)) // until pools and caches have their size
		before := w.usage()
		r.run(times)
		var after usage
		// The watcher temporarily holds resources.
		nstest.Eventually(t, func() error {
			after = w.usage()
			if grown := before.more(after); grown != "" {
				return fmt.Errorf("%d registrations and removals: %s", times, grown)
			}
			return nil
		})
		t.Logf("%d registrations and removals: before %+v, after %+v", times, before, after)
		r.see()
		w.remove()
		for o := range r.seen {
			deadline(t, func() bool { return !o.exists() })
		}
		t.Logf("of %d objects of the kernel that were pinned none is left", len(r.seen))
	})
}

// registrations adds and removes members and services.
type registrations struct {
	*world
	scope   string
	members []*sink
	second  spec.Service
	n       int
	seen    map[object]bool // pinned so far
}

func newRegistrations(w *world) *registrations {
	r := &registrations{world: w, scope: w.state().Scope(), seen: map[object]bool{}}
	for range 2 {
		r.members = append(r.members, startSink(w.t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
	}
	r.second = newWorld(w.t, w.cfg.Services[0].Options, "udp 0.0.0.0:9992", "udp 127.9.0.9:9991").cfg.Services[0]
	r.second.Name = "second"
	return r
}

// run registers and removes slots each time, and services occasionally. It ends without the second service, as at the
// start.
func (r *registrations) run(times int) {
	for ; times > 0 || r.n%20 != 0; times-- {
		r.n++
		at := slots.Slot{Scope: r.scope, Service: "svc", Slot: r.n % 2}
		m := service.Member{Slot: at.Slot, PID: r.members[r.n/2%2].pid()}
		r.locked(func(l *kernel.WriteLock) error {
			if changed, err := engine.AdmitLocked(context.Background(), l, at, &m, nil); err != nil || !changed {
				return fmt.Errorf("registered %s: %v, %w", m, changed, err)
			}
			return nil
		})
		r.locked(func(l *kernel.WriteLock) error { return engine.Withdraw(l, at) })
		switch r.n % 20 {
		case 1:
			r.cfg.Services = append(r.cfg.Services[:1], r.second)
			r.apply()
			r.see()
		case 0:
			r.locked(func(l *kernel.WriteLock) error { return engine.RemoveService(l, r.scope, "second") })
			r.cfg.Services = r.cfg.Services[:1]
		}
	}
}

func (r *registrations) see() {
	for _, o := range r.objects() {
		r.seen[o] = true
	}
}
