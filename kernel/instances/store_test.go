// SPDX-License-Identifier: Apache-2.0

package instances

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

type testSpec struct {
	Netns string `json:"netns"`
	Size  int    `json:"size"`
}

var testObject = []byte("object")

var testStore = Store[testSpec]{Feature: "test", ABI: 3, Object: func() []byte { return testObject },
	Is: func(name string) bool { return !strings.HasPrefix(name, "@") }, Ref: func(s *testSpec) string { return s.Netns }}

func TestMain(m *testing.M) { nstest.Main(m) }

// newRoot opens a root for one test, and removes it at the end.
func newRoot(t *testing.T) *kernel.Root {
	t.Helper()
	nstest.NeedRoot(t)
	path := filepath.Join(nstest.BPFFS, fmt.Sprintf("instances_%d_%d", os.Getpid(), time.Now().UnixNano()))
	t.Cleanup(func() { os.RemoveAll(path) })
	return kernel.OpenRoot(path)
}

func lock(t *testing.T, r *kernel.Root) *kernel.WriteLock {
	t.Helper()
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func newMap() (*ebpf.Map, error) {
	return ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
}

// put publishes an instance with a map in the namespace.
func put(t *testing.T, l *kernel.WriteLock, ns *netns.Handle, name string, spec testSpec) kernel.Instance {
	t.Helper()
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	i := testStore.Name(kernel.ScopeOf(ns), name)
	if err := testStore.Publish(l, i, Form[testSpec]{Spec: spec, Netns: ns, Pins: kernel.Pins{Maps: map[string]*ebpf.Map{"a": m}}}); err != nil {
		t.Fatal(err)
	}
	return i
}

// remake publishes the pins of an instance with another meta.
func remake(t *testing.T, l *kernel.WriteLock, i kernel.Instance, change func(*kernel.Meta)) {
	t.Helper()
	o, err := l.Open(i)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	change(&o.Meta)
	if err := l.Publish(i, o.Meta, kernel.Pins{Maps: o.Maps}); err != nil {
		t.Fatal(err)
	}
}

func current(t *testing.T) *netns.Handle {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func TestStore(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	ns := current(t)
	i := put(t, l, ns, "one", testSpec{ns.String(), 1})
	put(t, l, nil, "two", testSpec{Size: 2})
	put(t, l, ns, "@other", testSpec{})
	rec, err := testStore.Read(r, i)
	if err != nil || rec.Instance != i || rec.Spec.Size != 1 || rec.Ref != ns.String() || !ns.Is(rec.ID()) || rec.Meta.Version != kernel.Version || testStore.Outdated(rec) {
		t.Errorf("read %+v, %v", rec, err)
	}
	all, unread, err := testStore.All(r)
	if err != nil || len(unread) > 0 || len(all) != 2 {
		t.Fatalf("all: %+v, %v, %v; want two", all, unread, err)
	}
	if in, _, err := testStore.In(r, kernel.HostScope); err != nil || len(in) != 1 || in[0].Name != "two" {
		t.Errorf("of the host: %+v, %v", in, err)
	}
	if err := testStore.Respec(l, i, testSpec{ns.String(), 5}, nil); err != nil {
		t.Fatal(err)
	}
	u, err := testStore.Open(l, i)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if u.Spec.Size != 5 || u.Pins.Maps["a"] == nil || !ns.Same(u.Netns) {
		t.Errorf("after another spec: %+v", u)
	}
	if err := testStore.RemoveAll(l, i.Scope); err != nil {
		t.Fatal(err)
	}
	if keys, err := testStore.Keys(r); err != nil || len(keys) != 1 || keys[0].Name != "two" {
		t.Errorf("left: %v, %v", keys, err)
	}
}

// An upgrade keeps the spec and the maps, and records this weir's object.
func TestStoreUpgrade(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i := put(t, l, nil, "one", testSpec{Size: 7})
	was := testObject
	testObject = []byte("another")
	defer func() { testObject = was }()
	rec, err := testStore.Read(r, i)
	if err != nil || !testStore.Outdated(rec) {
		t.Fatalf("%+v, %v: want outdated", rec, err)
	}
	more, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	moved := false
	if err := testStore.Upgrade(l, i, func() error { moved = true; return nil }, map[string]*ebpf.Map{"b": more}); err != nil {
		t.Fatal(err)
	}
	u, err := testStore.Open(r, i)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if !moved || testStore.Outdated(u.Record) || u.Spec.Size != 7 || u.Pins.Maps["a"] == nil || u.Pins.Maps["b"] == nil {
		t.Errorf("moved %t; %+v with %v", moved, u.Record, u.Pins.Maps)
	}
}

// A faulty instance does not affect reading, changing and removing others.
func TestStoreUnreadable(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, l *kernel.WriteLock, i kernel.Instance)
		want  error
	}{
		"a newer ABI": {func(t *testing.T, l *kernel.WriteLock, i kernel.Instance) {
			remake(t, l, i, func(m *kernel.Meta) { m.ABI, m.Version = 4, "v9.9.9" })
		}, kernel.ErrABI},
		"no spec": {func(t *testing.T, l *kernel.WriteLock, i kernel.Instance) {
			remake(t, l, i, func(m *kernel.Meta) { m.Config = []byte("{") })
		}, nil},
		"no meta of weir's": {func(t *testing.T, l *kernel.WriteLock, i kernel.Instance) {
			path := filepath.Join(l.Path(), i.Scope, i.Feature, i.Name, "meta")
			m, err := newMap()
			if err == nil {
				defer m.Close()
				err = errors.Join(os.Remove(path), m.Pin(path))
			}
			if err != nil {
				t.Fatal(err)
			}
		}, kernel.ErrABI},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			l := lock(t, r)
			defer l.Unlock()
			put(t, l, nil, "a", testSpec{})
			bad := put(t, l, nil, "b", testSpec{})
			good := put(t, l, nil, "c", testSpec{})
			c.spoil(t, l, bad)
			all, unread, err := testStore.All(r)
			if err != nil || len(all) != 2 || len(unread) != 1 || !unread.Has(bad) || len(unread.In(kernel.HostScope)) != 1 || len(unread.In("7")) != 0 {
				t.Fatalf("%v, %v, %v", all, unread, err)
			}
			if err := unread.Err(); !strings.Contains(err.Error(), "host/test/b") || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("told: %v", err)
			}
			text, err := json.Marshal(unread)
			var back Unreadable
			if err = errors.Join(err, json.Unmarshal(text, &back)); err != nil || !back.Has(bad) || back.Err().Error() != unread.Err().Error() {
				t.Errorf("as JSON %s: %v, %v", text, back, err)
			}
			if err := errors.Join(testStore.Respec(l, good, testSpec{Size: 3}, nil), testStore.Remove(l, bad)); err != nil {
				t.Error(err)
			}
		})
	}
}

// An instance of a gone namespace is not opened in the namespace with its number.
func TestStoreGone(t *testing.T) {
	nstest.NeedRoot(t)
	r := newRoot(t)
	ns := current(t)
	if ns.ID().Cookie == 0 {
		t.Skip("need: kernel: SO_NETNS_COOKIE (Linux 5.14)")
	}
	l := lock(t, r)
	defer l.Unlock()
	i := put(t, l, ns, "one", testSpec{})
	u, err := testStore.Open(l, i)
	if err != nil {
		t.Fatal(err)
	}
	u.Close()
	remake(t, l, i, func(m *kernel.Meta) { m.Cookie++ })
	if _, err := testStore.Open(l, i); !errors.Is(err, netns.ErrGone) {
		t.Errorf("opened: %v", err)
	}
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A saved instance names its namespace by inode number and cookie.
func TestStoreSaves(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	ns := current(t)
	put(t, l, ns, "one", testSpec{"ref", 1})
	bad := put(t, l, ns, "two", testSpec{"ref", 2})
	remake(t, l, bad, func(m *kernel.Meta) { m.ABI = 9 })
	text, err := testStore.Save(r)
	if err != nil {
		t.Fatal(err)
	}
	was, err := testStore.Saved(text)
	if err != nil || len(was) != 1 || was[0].Spec.Size != 1 || was[0].Ref != "ref" || was[0].ID() != ns.ID() {
		t.Errorf("%s: %+v, %v", text, was, err)
	}
	if _, err := testStore.Saved([]byte("{")); err == nil {
		t.Error("half a text was read")
	}
	if !slices.Equal(must(testStore.Keys(r))(t), []kernel.Instance{was[0].Instance, bad}) {
		t.Error("saving changed something")
	}
}
