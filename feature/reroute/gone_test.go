// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// syncBuffer is a log written by another goroutine.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// loseNetns deletes the namespace r1. left returns the number of its remaining instances.
func (w *world) loseNetns() (left func() int) {
	w.Helper()
	scope := fmt.Sprint(w.r1.Inode())
	left = func() int {
		all, err := w.root.Instances(Name)
		if err != nil {
			w.Fatal(err)
		}
		return len(slices.DeleteFunc(all, func(i kernel.Instance) bool { return i.Scope != scope }))
	}
	name := w.name[w.r1]
	w.r1.Close()
	if err := netns.Delete(name); err != nil {
		w.Fatal(err)
	}
	return left
}

// protectBoth protects both ends, by probes or by BFD, in named namespaces.
func (w *world) protectBoth(withBFD bool) {
	w.Helper()
	for n := range w.name {
		f := strings.Fields(n.String())
		w.name[n] = f[len(f)-1]
	}
	if withBFD {
		if err := kernel.Require(engine.Needs()); err != nil {
			w.Skip("need: kernel", err)
		}
		w.apply(w.bothEnds("bfd: {peer: fd00:12::2, interval: 50ms}", "bfd: {peer: fd00:12::1, interval: 50ms}"))
	} else {
		w.apply(w.config())
	}
}

// Paths, sessions and BFD sessions of a deleted namespace are reported, and apply removes them.
func TestNamespaceIsGone(t *testing.T) {
	for _, withBFD := range []bool{false, true} {
		t.Run(fmt.Sprintf("BFD %t", withBFD), func(t *testing.T) {
			w := newWorld(t)
			w.protectBoth(withBFD)
			left := w.loseNetns()
			const gone = "network namespace cannot be opened"
			st := w.state()
			if p := st.Paths[slices.IndexFunc(st.Paths, func(p protect.PathState) bool { return p.Name == "there" })]; !p.Gone || len(p.Problems) != 1 || !strings.Contains(p.Problems[0], gone) {
				t.Errorf("the path is %+v", p)
			}
			for _, s := range st.Sessions {
				if there := s.Name == "there"; there != strings.Contains(s.Problem, gone) {
					t.Errorf("a session is %+v", s)
				}
			}
			for _, s := range st.BFD {
				if there := s.Name == "there"; there != strings.Contains(s.Problem, gone) || there && s.State != bfd.Down {
					t.Errorf("a BFD session is %+v", s)
				}
			}
			for _, l := range st.TimerLoops {
				if l.Netns == w.name[w.r1] {
					t.Errorf("a loop is %+v", l)
				}
			}
			found, err := Feature{}.Examine(t.Context(), w.root)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, f := range found {
				if strings.Contains(f.Text, gone) {
					n++
					if f.Remedy != goneRemedy {
						t.Errorf("doctor advises %q of %s", f.Remedy, f.Object)
					}
				}
			}
			if n != 2 { // the path and its session
				t.Errorf("doctor found %+v", found)
			}
			w.apply("reroute: []")
			if n := left(); n != 0 {
				t.Errorf("apply leaves %d instances", n)
			}
		})
	}
}

// weir serve removes the pins of a deleted namespace and logs this.
func TestServeRemovesGone(t *testing.T) {
	for _, withBFD := range []bool{false, true} {
		t.Run(fmt.Sprintf("BFD %t", withBFD), func(t *testing.T) {
			w := newWorld(t)
			w.protectBoth(withBFD)
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			log := &syncBuffer{}
			go func() {
				defer close(ended)
				_ = Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(log, nil)))
			}()
			defer func() { cancel(); <-ended }()
			w.eventually("links are followed", func() bool { return strings.Count(log.String(), "links are followed") == 2 })
			scope := fmt.Sprint(w.r1.Inode())
			left := w.loseNetns()
			w.eventually("nothing is left", func() bool { return left() == 0 })
			w.eventually("it is told", func() bool {
				return strings.Contains(log.String(), "removed: its network namespace is gone, net:["+scope+"]")
			})
			if st := w.state(); len(st.Paths) != 1 || st.Paths[0].Name != "back" { // its interface is deleted with the peer, sooner or later
				t.Errorf("of the other namespace is left %+v", st.Paths)
			}
		})
	}
}

// A namespace reachable only by its configuration's reference stays.
func TestKeepsReferredNamespace(t *testing.T) {
	w := newWorld(t)
	w.apply(w.config()) // by /proc/PID/fd/N
	f := strings.Fields(w.r1.String())
	if err := netns.Delete(f[len(f)-1]); err != nil {
		t.Fatal(err)
	}
	all, err := w.root.Instances(Name)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if gone, err := isGone(w.root, i, func(string, netns.ID) {}); err != nil || gone {
			t.Errorf("%v is gone: %t, %v", i, gone, err)
		}
	}
}
