// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

func TestPublishOpenReplaceRemove(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	wantVersion(t, r, instance, 0)
	for v := range uint64(3) {
		if err := publish(l, instance, v+1); err != nil {
			t.Fatal(err)
		}
		wantVersion(t, r, instance, v+1)
		wantVersion(t, l, instance, v+1)
	}
	o, err := r.Open(instance, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if want := metaOf(3); o.Meta.ABI != want.ABI || !o.Meta.Created.Equal(want.Created) || o.Meta.Version != want.Version || o.Meta.Inode != want.Inode {
		t.Errorf("meta is %+v, want %+v", o.Meta, want)
	}
	if len(o.Maps) != 1 || o.Maps["b"] == nil {
		t.Errorf("opened %v, want map b alone", o.Maps)
	}
	if err := o.Maps["b"].Put(uint32(0), uint64(9)); err == nil {
		t.Error("a reader could write")
	}
	if names, err := o.Links(); err != nil || !slices.Equal(names, []string{"lookup"}) {
		t.Errorf("links: %v, %v", names, err)
	}
	ln, err := o.Link("lookup")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if _, err := o.Link("absent"); !errors.Is(err, ErrNotExist) {
		t.Errorf("absent link: %v", err)
	}
	if _, err := r.Open(instance, "absent"); !errors.Is(err, ErrNotExist) {
		t.Errorf("absent map: %v", err)
	}
	if err := l.Remove(instance); err != nil {
		t.Fatal(err)
	}
	wantVersion(t, r, instance, 0)
	if err := l.Remove(instance); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
	l.Unlock()
	if left := tree(t, r); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// The link holds the attachment: it stays from one publication to the next, and ends with the last pin.
func TestLinksLiveByTheirPins(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	for v := range uint64(3) {
		if err := publish(l, instance, v+1); err != nil {
			t.Fatal(err)
		}
		nstest.Until(t, "exactly one link is attached", func() bool { return lookupLinks(t) == 1 })
	}
	if err := l.Remove(instance); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "no link is attached", func() bool { return lookupLinks(t) == 0 })
}

// Publishing must neither move nor unpin a map pinned by another instance.
func TestMapOfTwoInstances(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	other := Instance{Scope: "4026531840", Feature: "test", Name: "two"}
	for _, i := range []Instance{instance, other, instance} {
		if err := l.Publish(i, Meta{}, Pins{Maps: map[string]*ebpf.Map{"shared": m}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []Instance{instance, other} {
		o, err := r.Open(i, "shared")
		if err != nil {
			t.Errorf("%s: %v", i, err)
			continue
		}
		o.Close()
	}
	if err := errors.Join(l.Remove(instance), l.Remove(other)); err != nil {
		t.Error(err)
	}
}

// brokenLink fails to be pinned, as another process's link might.
type brokenLink struct{ link.Link }

func (brokenLink) Pin(string) error { return errors.New("broken on purpose") }

func TestPublishThatFailsLeavesTheOldOne(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	bad := Pins{Links: map[string]link.Link{"x": brokenLink{}}}
	for _, before := range []uint64{0, 1} {
		if before != 0 {
			if err := publish(l, instance, before); err != nil {
				t.Fatal(err)
			}
		}
		err := l.Publish(instance, metaOf(2), bad)
		if err == nil || !strings.Contains(err.Error(), "host/test/one") || !strings.Contains(err.Error(), "link_x") {
			t.Errorf("error %v, want one that names the instance and the pin", err)
		}
		wantVersion(t, r, instance, before)
		if left := inTransit(t, r); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

func TestInstances(t *testing.T) {
	r := newRoot(t)
	if all, err := r.Instances(""); err != nil || len(all) != 0 {
		t.Errorf("without a root: %v, %v", all, err)
	}
	l := lock(t, r)
	defer l.Unlock()
	want := []Instance{{"4026531840", "steer", "b"}, {"host", "steer", "@engine"}, {"host", "steer", "a"}, {"host", "watch", "c"}}
	for _, i := range want {
		if err := publish(l, i, 1); err != nil {
			t.Fatal(err)
		}
	}
	// Staged and retired directories are not listed.
	for _, name := range []string{"d+new", "e+old"} {
		if err := os.Mkdir(filepath.Join(r.path, "host/watch", name), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := r.Instances(""); err != nil || !slices.Equal(got, want) {
		t.Errorf("all: %v, %v; want %v", got, err, want)
	}
	if got, err := r.Instances("steer"); err != nil || !slices.Equal(got, want[:3]) {
		t.Errorf("of steer: %v, %v; want %v", got, err, want[:3])
	}
	l.Unlock()
	l = lock(t, r)
	if left := inTransit(t, r); len(left) > 0 {
		t.Errorf("not recovered: %v", left)
	}
	for _, i := range want {
		if err := l.Remove(i); err != nil {
			t.Error(err)
		}
	}
}

// Links are unpinned first: no packet may meet a program without its maps. Then comes meta: while it exists, every map
// exists.
func TestOrderOfRemoval(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	var order []string
	var last []string
	kerneltest.OnStep(func(step string) {
		now, _ := filepath.Glob(r.dir(instance) + retireSuffix + "/*")
		for _, pin := range last {
			if !slices.Contains(now, pin) {
				order = append(order, filepath.Base(pin))
			}
		}
		last = now
	})
	defer kerneltest.OnStep(nil)
	if err := l.Remove(instance); err != nil {
		t.Fatal(err)
	}
	slices.Sort(order[min(2, len(order)):]) // the maps in any order
	if want := []string{"link_lookup", "meta", "map_a", "map_b"}; !slices.Equal(order, want) {
		t.Errorf("unpinned %v, want %v", order, want)
	}
}

// Readers that open an instance during replacements see all parts of the same version, and never a missing instance.
func TestReadersDuringReplace(t *testing.T) {
	for _, kind := range []string{"exchange", "twostep"} {
		t.Run(kind, func(t *testing.T) {
			if kind == "exchange" {
				needExchange(t)
			} else {
				kerneltest.WithoutExchange()
				defer kerneltest.WithExchange()
			}
			r := newRoot(t)
			l := lock(t, r)
			if err := publishWith(l, instance, 1, nil); err != nil {
				t.Fatal(err)
			}
			// Between two renames a reader waits this long for the second one. A longer pause is a stall of the writer.
			var retired time.Time
			var between time.Duration // the longest time between the two renames
			kerneltest.OnStep(func(step string) {
				switch step {
				case "publish:retired":
					retired = time.Now()
				case "publish:replaced":
					between = max(between, time.Since(retired))
				}
			})
			defer kerneltest.OnStep(nil)
			var done atomic.Bool
			var reads, missing atomic.Int64
			var readers sync.WaitGroup
			for range 2 {
				readers.Go(func() {
					for last := uint64(1); !done.Load(); reads.Add(1) {
						v, err := version(r, instance)
						if err == nil && v == 0 {
							missing.Add(1)
							continue
						}
						if err != nil || v < last {
							t.Errorf("read version %d after %d: %v", v, last, err)
							return
						}
						last = v
					}
				})
			}
			for v := uint64(2); v < 200 || reads.Load() < 200 && v < 2000; v++ {
				if err := publishWith(l, instance, v, nil); err != nil {
					t.Error(err)
					break
				}
			}
			done.Store(true)
			readers.Wait()
			t.Log(reads.Load(), "reads")
			if n := missing.Load(); n > 0 && between < openTries*time.Millisecond {
				t.Errorf("it was missing %d times, and not longer than %v between two renames", n, between)
			}
			if err := l.Remove(instance); err != nil {
				t.Error(err)
			}
			l.Unlock()
		})
	}
}

// Despite fast replacements, a reader does not take a free name for a removed instance. The test uses bare directories:
// complete instances are replaced too slowly to hit a reader between two looks.
func TestFreeNameIsNotRemoval(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	dir := r.dir(instance)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	var done atomic.Bool
	var writer sync.WaitGroup
	writer.Go(func() {
		for !done.Load() {
			for _, err := range []error{
				os.Mkdir(dir+stagedSuffix, 0o750),
				os.Rename(dir, dir+retireSuffix),
				os.Rename(dir+stagedSuffix, dir),
				os.Remove(dir + retireSuffix),
			} {
				if err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for range 20_000 {
		if !r.replaced(instance, nil) {
			t.Error("an instance that is being replaced was taken for removed")
			break
		}
	}
	done.Store(true)
	writer.Wait()
	if err := os.Remove(dir); err != nil {
		t.Error(err)
	}
	if r.replaced(instance, nil) {
		t.Error("a removed instance was taken for one that is being replaced")
	}
}

func TestWrongNames(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	for _, i := range []Instance{{}, {"..", "f", "n"}, {"s", "..", "n"}, {"s", "f", "../x"}, {"s", "f", "a/b"}, {"s", "f", "n+new"}, {"s", "f", "."}, {"s", "f", ""}} {
		for what, err := range map[string]error{"publish": publishWith(l, i, 1, nil), "remove": l.Remove(i)} {
			if err == nil || !strings.Contains(err.Error(), "is not a valid pin name") {
				t.Errorf("%s %q: %v", what, i, err)
			}
		}
	}
	if got := tree(t, r); len(got) != 1 {
		t.Errorf("made %v", got)
	}
}

func TestValidName(t *testing.T) {
	for name, want := range map[string]struct{ pin, service bool }{
		"telemetry":             {true, true},
		"a-B_9":                 {true, true},
		"4026531840":            {true, true},
		"@engine":               {true, false},
		"@":                     {},
		"@@x":                   {},
		"":                      {},
		".":                     {},
		"..":                    {},
		"a.b":                   {},
		"a/b":                   {},
		"a b":                   {},
		"a+new":                 {},
		"é":                     {},
		"a\x00":                 {},
		strings.Repeat("x", 63): {true, true},
		strings.Repeat("x", 64): {},
	} {
		if got := validName(name); got != want.pin {
			t.Errorf("validName(%q) is %v", name, got)
		}
		if got := ValidName(name); got != want.service {
			t.Errorf("ValidName(%q) is %v", name, got)
		}
	}
	if s := fmt.Sprint(instance); s != "host/test/one" {
		t.Errorf("an instance is printed as %q", s)
	}
}
