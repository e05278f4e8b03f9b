// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	Enter()
	nstest.Main(m)
}

func newEnv(t *testing.T) *Env {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	e, err := NewEnv(Smoke, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// leftover reports whether a leftover contains a word.
func leftover(e *Env, word string) bool {
	return strings.Contains(fmt.Sprint(e.Leftovers()), word)
}

// soonLeftover waits for such a leftover. A process has no environment and command line for an instant
// during exec. Every process in a namespace passes this instant once.
func soonLeftover(e *Env, word string) bool { return soonLeftovers(e, word, 1) > 0 }

// soonLeftovers waits for want leftovers with this word and returns the last count.
func soonLeftovers(e *Env, word string, want int) (n int) {
	_ = nstest.Poll(nstest.Timeout(), func() error {
		if n = strings.Count(fmt.Sprint(e.Leftovers()), word); n < want {
			return errors.New("too few")
		}
		return nil
	})
	return n
}

// Every object of a run is counted while it exists, and removed by Close. This includes a child abandoned
// by its parent, outside the group, with another title.
func TestCloseLeavesNothing(t *testing.T) {
	e := newEnv(t)
	_, name, err := e.Namespace("a")
	if err != nil {
		t.Fatal(err)
	}
	pins := e.Root
	recorded := filepath.Join(kernel.RecordDir, url.PathEscape(filepath.Join(pins, "other")))
	if err := errors.Join(os.Mkdir(pins, 0o755), os.MkdirAll(recorded, 0o750)); err != nil {
		t.Fatal(err)
	}
	helper, strange := "weir-reroute-"+e.scopes[0], filepath.Join(bpffs, "other", e.scopes[0]) // pins below another root
	h, err := netns.Create(helper)
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	if err := os.MkdirAll(strange, 0o755); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	script := `env -i setsid sleep 1000 & echo orphan $!` // no mark in its environment: only the namespace identifies it
	p, err := e.Start(Command{Namespace: name, Path: "sh", Args: []string{"-c", script}, Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if _, err := e.Start(Command{Path: "sleep", Args: []string{"1000"}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"namespace " + name, "sleep 1000", "directory " + pins, "directory " + recorded, "directory " + e.Dir,
		"namespace " + helper, "directory " + strange} {
		if !soonLeftover(e, want) {
			t.Errorf("%q is not counted: %v", want, e.Leftovers())
		}
	}
	if n := soonLeftovers(e, "sleep 1000", 2); n != 2 {
		t.Errorf("%d processes counted, want the orphan and the other: %v", n, e.Leftovers())
	}
	e.Close()
	if left := e.Leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := e.Start(Command{Path: "true"}); err == nil {
		t.Error("a process was started after Close")
	}
}

// A program started in a namespace runs in it.
func TestStartInNamespace(t *testing.T) {
	e := newEnv(t)
	h, name, err := e.Namespace("b")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	p, err := e.Start(Command{Namespace: name, Path: "readlink", Args: []string{"/proc/self/ns/net"}, Output: &out, Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if got, want := strings.TrimSpace(out.String()), fmt.Sprintf("net:[%d]", h.Inode()); got != want {
		t.Errorf("it ran in %s, want %s", got, want)
	}
}

func TestStartUnknownProgram(t *testing.T) {
	e := newEnv(t)
	if _, err := e.Start(Command{Path: "no-such-program"}); err == nil || !strings.Contains(err.Error(), "not installed") {
		t.Errorf("error %v, want not installed", err)
	}
}

// A killed run cannot clean up; the next run does.
func TestSweep(t *testing.T) {
	e := newEnv(t)
	_, name, err := e.Namespace("c")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Start(Command{Namespace: name, Path: "sleep", Args: []string{"1000"}}); err != nil {
		t.Fatal(err)
	}
	if !soonLeftover(e, "sleep 1000") {
		t.Fatalf("not started: %v", e.Leftovers())
	}
	sweep()
	// This polls again: the first match may have been the process before its exec of sleep.
	if !soonLeftover(e, name) || !soonLeftover(e, "sleep 1000") {
		t.Fatalf("sweep removed a run in progress: %v", e.Leftovers())
	}
	e.lock.Close()                      // like the kernel when the lab is killed
	nstest.Eventually(t, func() error { // the run of another package may be sweeping, and holds the lock until it is done
		sweep()
		if left := e.Leftovers(); len(left) > 0 {
			return fmt.Errorf("left behind: %v", left)
		}
		return nil
	})
}

// A run started during sweeps keeps its directory and its lock.
func TestStartWhileOthersSweep(t *testing.T) {
	newEnv(t).Close() // it checks for root
	stop := make(chan struct{})
	var sweeping sync.WaitGroup
	for range 4 {
		sweeping.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					sweep()
				}
			}
		})
	}
	dir := filepath.Join(os.TempDir(), prefix+"0") // no process has this number
	for range 200 {
		lock, err := makeDir(dir, 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if second, err := lockDir(dir); err == nil {
			second.Close()
			t.Fatal("the directory of the run is not locked")
		}
		lock.Close()
	}
	close(stop)
	sweeping.Wait()
	sweep()
}

// Execute counts leftovers after the cleanup, and cleans up after failures too.
func TestExecute(t *testing.T) {
	newEnv(t).Close() // it checks for root
	broken := errors.New("broken")
	for _, fails := range []bool{false, true} {
		var dir string
		x := Experiment{Name: "x", Run: func(_ context.Context, e *Env, r *Result) error {
			dir = e.Dir
			if _, _, err := e.Namespace("d"); err != nil {
				return err
			}
			r.Set("lost", 0)
			r.Claim(Correctness, "nothing is lost", "lost", "== 0")
			if fails {
				return broken
			}
			return nil
		}}
		r, err := Execute(t.Context(), x, Options{Size: Smoke})
		if fails != errors.Is(err, broken) {
			t.Errorf("error %v", err)
		}
		if n, ok := r.Metrics[LeftoversMetric]; !ok || n != 0 {
			t.Errorf("leftovers %v, %v: %v", n, ok, r.Notes)
		}
		if !fails && (!r.OK || len(r.Claims) != 2) {
			t.Errorf("claims %+v", r.Claims)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestKeepFiles(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "kept")
	if err := os.MkdirAll(filepath.Join(from, "a/b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "a/b/log"), []byte("line\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(from, "never")); err != nil {
		t.Fatal(err)
	}
	if err := keepFiles(from, to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "a/b/log")); err != nil || string(got) != "line\n" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := os.Lstat(filepath.Join(to, "never")); err == nil {
		t.Error("a non-regular file was kept")
	}
}

func TestPercentiles(t *testing.T) {
	var d []time.Duration
	for i := 100; i > 0; i-- {
		d = append(d, time.Duration(i))
	}
	if p50, p99, longest := Percentiles(d); p50 != 51 || p99 != 100 || longest != 100 {
		t.Error(p50, p99, longest)
	}
	if p50, p99, longest := Percentiles(nil); p50 != 0 || p99 != 0 || longest != 0 {
		t.Error(p50, p99, longest)
	}
}

// The stall measurement takes samples.
func TestStalls(t *testing.T) {
	// Its threads start with a delay.
	for nap := 50 * time.Millisecond; nap < 30*time.Second; nap *= 2 {
		s := WatchStalls()
		time.Sleep(nap)
		if _, _, longest := s.Stop(); longest > 0 {
			return
		}
	}
	t.Error("no time was measured")
}

// A period includes only the part of a stall inside it.
func TestStallsWithin(t *testing.T) {
	s := &Stalls{times: []stall{{100, 150}, {300, 320}, {310, 400}}}
	for _, c := range []struct {
		from, to uint64
		want     time.Duration
	}{{0, 100, 0}, {0, 120, 20}, {110, 120, 10}, {150, 300, 0}, {0, 1000, 90}, {305, 330, 20}} {
		if got := s.Within(c.from, c.to); got != c.want {
			t.Errorf("%d to %d: %d, want %d", c.from, c.to, got, c.want)
		}
	}
}

// Daemons of root would read a configuration in the directory of another user.
func TestForeignDirectory(t *testing.T) {
	nstest.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), "run")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []os.FileMode{0o755, 0o777} {
		begin := time.Now()
		if lock, err := makeDir(dir, time.Minute); !errors.Is(err, errForeign) || time.Since(begin) > 10*time.Second {
			t.Errorf("mode %v: %v, %v", mode, lock, err)
		}
		if err := errors.Join(os.Chown(dir, 0, 0), os.Chmod(dir, 0o777)); err != nil {
			t.Fatal(err)
		}
	}
}
