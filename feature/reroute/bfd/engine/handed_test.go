// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// holder keeps links in this process, as systemd does.
type holder map[string]*os.File

func (h holder) Put(link string, fd int) error {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		h[link] = os.NewFile(uintptr(own), link)
	}
	return err
}

func (h holder) Remove(link string) {
	if f := h[link]; f != nil {
		f.Close()
		delete(h, link)
	}
}

// given returns duplicates of the files, as the next process gets them.
func (h holder) given(t *testing.T) map[string]*os.File {
	out := map[string]*os.File{}
	for name, f := range h {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = os.NewFile(uintptr(fd), name)
	}
	return out
}

// Sessions with kept links continue without a process and with the next one. The next one may be another weir
// version, with new programs. The state of another bfdd, or with nothing kept, is not adopted.
func TestHanded(t *testing.T) {
	s := newSide(t)
	kept := holder{}
	open := func(text string, keep Keep, links map[string]*os.File) *Engine {
		t.Helper()
		e, err := OpenHanded(t.Context(), s.root, s.here, tick, Handed{Text: []byte(`"` + text + `"`), Keep: keep, Links: links})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	far, err := Open(t.Context(), s.root, s.there, tick)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	back := s.session(2, "10.9.0.2", "10.9.0.1")
	back.Ifindex = nstest.Ifindex(t, s.there, "w0")
	if err := far.Put(t.Context(), back); err != nil {
		t.Fatal(err)
	}
	there := s.session(1, "10.9.0.1", "10.9.0.2")
	owner := Owner{Connection: 1 << 60, Version: 2, Device: "w0"}
	handOver := func(e *Engine) {
		t.Helper()
		if err := errors.Join(e.Put(t.Context(), there), e.SetOwner(there.Discriminator, owner)); err != nil {
			t.Fatal(err)
		}
	}
	up := func(e *Engine, what string) {
		t.Helper()
		nstest.Until(s, what, func() bool {
			if err := errors.Join(e.Recover(t.Context()), far.Recover(t.Context())); err != nil { // Recover also resolves neighbours
				t.Fatal(err)
			}
			e.mu.Lock()
			far.mu.Lock()
			defer e.mu.Unlock()
			defer far.mu.Unlock()
			if err := errors.Join(e.resolve(), far.resolve()); err != nil {
				t.Fatal(err)
			}
			near, _, err := e.Status(there.Discriminator)
			other, _, oerr := far.Status(back.Discriminator)
			if err = errors.Join(err, oerr); err != nil {
				t.Fatal(err)
			}
			return near.State == bfd.Up && other.State == bfd.Up
		})
	}
	e := open("one", kept, nil)
	handOver(e)
	up(e, "both ends are up")
	if e.Adopted() || len(kept) == 0 {
		t.Errorf("adopted: %t; %d links kept", e.Adopted(), len(kept))
	}
	downs := func() uint64 {
		t.Helper()
		st, there, err := far.Status(back.Discriminator)
		if err != nil || !there {
			t.Fatal(there, err)
		}
		return st.Downs
	}
	heard := func() time.Duration {
		st, _, err := far.Status(back.Discriminator)
		if err != nil {
			t.Fatal(err)
		}
		return st.Heard
	}
	began := downs()
	for _, another := range []bool{false, true} {
		e.Close()
		last := heard()
		nstest.Until(s, "packets come while there is no process", func() bool { return heard() > last+5*every })
		if another {
			s.exchanged(e.instance)
		}
		before := s.programs(t, kept)
		e = open("one", kept, kept.given(t))
		if owners, err := e.Owners(); err != nil || !e.Adopted() || !maps.Equal(owners, map[uint32]Owner{there.Discriminator: owner}) {
			t.Errorf("another weir: %t: adopted: %t, owners %v, %v", another, e.Adopted(), owners, err)
		}
		if after := s.programs(t, kept); maps.Equal(before, after) == another {
			t.Errorf("another weir: %t: links run %v, they ran %v", another, after, before)
		}
		last = heard()
		nstest.Until(s, "packets come with the next one", func() bool { return heard() > last+5*every })
		up(e, "both ends are up still")
	}
	if n := downs(); n != began {
		t.Errorf("the other end was down %d times", n-began)
	}
	e.Close()
	e = open("another's", kept, kept.given(t))
	if all, err := e.Sessions(); err != nil || e.Adopted() || len(all) != 0 {
		t.Errorf("of another bfdd: adopted: %t, sessions %v, %v", e.Adopted(), all, err)
	}
	handOver(e)
	up(e, "both ends are up again")
	e.Close()
	l, err := s.root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = l.Remove(e.instance)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	e = open("another's", kept, kept.given(t))
	if all, err := e.Sessions(); err != nil || e.Adopted() || len(all) != 0 {
		t.Errorf("removed meanwhile: adopted: %t, sessions %v, %v", e.Adopted(), all, err)
	}
	last := heard()
	nstest.Steadily(t, 10*every, func() error {
		if now := heard(); now > last+2*every {
			return fmt.Errorf("packets of what was removed still come %v after the end", now-last)
		}
		return nil
	})
	handOver(e)
	up(e, "both ends are up once more")
	if err := e.Abandon(t.Context()); err != nil {
		t.Error(err)
	}
	e.Close()
	if len(kept) != 0 {
		t.Errorf("kept after the end: %v", kept)
	}
	if all, _, err := AllHanded(s.root); err != nil || len(all) != 0 {
		t.Errorf("pinned after the end: %v, %v", all, err)
	}
	e = open("one", nil, nil)
	handOver(e)
	up(e, "both ends are up without anybody who keeps anything")
	e.Close()
	last = heard()
	nstest.Steadily(t, 10*every, func() error {
		if now := heard(); now > last+2*every {
			return fmt.Errorf("packets still come %v after the end", now-last)
		}
		return nil
	})
	// A failed adoption leaves nothing behind.
	e = open("one", kept, nil)
	handOver(e)
	e.Close()
	s.broken(e.instance)
	if _, err := OpenHanded(t.Context(), s.root, s.here, tick, Handed{Text: []byte(`"one"`), Keep: kept, Links: kept.given(t)}); err == nil {
		t.Error("went on without a map")
	}
	if len(kept) != 0 {
		t.Errorf("kept for nobody: %v", kept)
	}
	e = open("one", nil, nil)
	defer e.Close()
	if all, err := e.Sessions(); err != nil || e.Adopted() || len(all) != 0 {
		t.Errorf("kept by nobody: adopted: %t, sessions %v, %v", e.Adopted(), all, err)
	}
}

// exchanged marks an instance's programs as another weir version's.
func (s *side) exchanged(i kernel.Instance) {
	s.Helper()
	s.republished(i, func(m *kernel.Meta, _ map[string]*ebpf.Map) { m.Object[0]++ })
}

func (s *side) republished(i kernel.Instance, change func(*kernel.Meta, map[string]*ebpf.Map)) {
	s.Helper()
	l, err := s.root.Lock(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	defer l.Unlock()
	o, err := l.Open(i)
	if err != nil {
		s.Fatal(err)
	}
	defer o.Close()
	meta, all := o.Meta, maps.Clone(o.Maps)
	change(&meta, all)
	if err := l.Upgrade(i, kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: all}, Swap: func() error { return nil }}); err != nil {
		s.Fatal(err)
	}
}

// broken removes a map from an instance.
func (s *side) broken(i kernel.Instance) {
	s.Helper()
	s.republished(i, func(_ *kernel.Meta, maps map[string]*ebpf.Map) { delete(maps, "clock") })
}

// programs returns the programs of the links.
func (s *side) programs(t *testing.T, kept holder) map[string]uint32 {
	t.Helper()
	out := map[string]uint32{}
	for name, f := range kept.given(t) {
		ln, err := kernel.LinkFrom(f)
		if err != nil {
			t.Fatal(err)
		}
		if out[name], err = kernel.LinkProgram(ln); err != nil {
			t.Fatal(err)
		}
		ln.Close()
	}
	return out
}
