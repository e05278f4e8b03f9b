// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/units"
)

func TestMain(m *testing.M) { nstest.Main(m) }

const patience = 30 * time.Second

// subtree makes a cgroup for one test. It is removed with its descendants.
func subtree(t *testing.T) string {
	t.Helper()
	nstest.NeedRoot(t)
	root, err := units.CgroupRoot()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("need: kernel with a cgroup2 mount:", err)
	} else if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, fmt.Sprintf("weir-workload-%d-%s", os.Getpid(), t.Name()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeAll(t, dir) })
	return dir
}

// removeAll removes cgroups bottom-up. Their files cannot be removed.
func removeAll(t *testing.T, dir string) {
	children, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	for _, c := range children {
		if c.IsDir() {
			removeAll(t, filepath.Join(dir, c.Name()))
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("remove %s: %v", dir, err)
	}
}

// world is a running table over a subtree.
type world struct {
	*testing.T
	*Table
	root    string
	changes chan Workload
}

func run(t *testing.T, o Options) *world {
	t.Helper()
	w := &world{T: t, root: o.Root, changes: make(chan Workload, 1<<16)}
	o.Changed = func(c Workload) { w.changes <- c }
	var err error
	if w.Table, err = Open(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- w.Table.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v, want the context's error", err)
		}
	})
	return w
}

func (w *world) mkdir(path string) {
	w.Helper()
	if err := os.MkdirAll(filepath.Join(w.root, path), 0o755); err != nil {
		w.Fatal(err)
	}
}

// next waits for one change.
func (w *world) next(cgroup string, gone bool) Workload {
	w.Helper()
	select {
	case c := <-w.changes:
		if c.Cgroup != cgroup || c.Gone != gone {
			w.Fatalf("changed %+v, want %s, gone %v", c, cgroup, gone)
		}
		return c
	case <-time.After(patience):
		w.Fatalf("nothing was told of %s", cgroup)
	}
	return Workload{}
}

// number returns the kernel's number of a cgroup: its inode, if inodes have 64 bits.
func (w *world) number(path string) ID {
	w.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(w.root, path), &st); err != nil {
		w.Fatal(err)
	}
	return ID(st.Ino)
}

// TestFollow makes and removes cgroups under a running table.
func TestFollow(t *testing.T) {
	root := subtree(t)
	if err := os.Mkdir(filepath.Join(root, "early.service"), 0o755); err != nil {
		t.Fatal(err)
	}
	w := run(t, Options{Root: root})
	w.next("/", false)
	w.next("/early.service", false)
	w.mkdir("batch.slice")
	w.next("/batch.slice", false)
	w.mkdir("batch.slice/job.service/worker")
	w.next("/batch.slice/job.service", false)
	worker := w.next("/batch.slice/job.service/worker", false)
	if worker.ID != w.number("batch.slice/job.service/worker") && runtime.GOARCH == "amd64" {
		t.Errorf("number %d, and the kernel has %d", worker.ID, w.number("batch.slice/job.service/worker"))
	}
	if got, ok := w.Get(worker.ID); !ok || got != worker || got.Text != "job.service" || got.Kind != Unit {
		t.Errorf("got %+v, %v", got, ok)
	}
	removeAll(t, filepath.Join(root, "batch.slice"))
	for _, path := range []string{"/batch.slice/job.service/worker", "/batch.slice/job.service", "/batch.slice"} {
		if gone := w.next(path, true); path == worker.Cgroup && gone.ID != worker.ID {
			t.Errorf("gone is %d, want %d", gone.ID, worker.ID)
		}
	}
	if got, ok := w.Get(worker.ID); ok {
		t.Errorf("nobody holds %+v", got)
	}
	if all := w.All(); len(all) != 2 || all[0].Cgroup != "/" || all[1].Cgroup != "/early.service" {
		t.Errorf("left are %+v", all)
	}
}

// TestHold keeps the name of a removed cgroup for two reporters, while another cgroup takes its path.
func TestHold(t *testing.T) {
	w := run(t, Options{Root: subtree(t)})
	w.next("/", false)
	w.mkdir("job.service")
	first := w.next("/job.service", false)
	for range 2 {
		if got, ok := w.Retain(first.ID); !ok || got != first {
			t.Fatalf("held %+v, %v", got, ok)
		}
	}
	if _, ok := w.Retain(first.ID + 1<<40); ok {
		t.Error("an unknown cgroup was held")
	}
	removeAll(t, filepath.Join(w.root, "job.service"))
	w.next("/job.service", true)
	w.mkdir("job.service")
	second := w.next("/job.service", false)
	if second.ID == first.ID {
		t.Fatalf("both have number %d", first.ID)
	}
	for held := 2; held > 0; held-- {
		got, ok := w.Get(first.ID)
		if !ok || !got.Gone || got.Text != "job.service" || len(w.All()) != 3 {
			t.Errorf("held %d times: %+v, %v", held, got, ok)
		}
		w.Release(first.ID)
	}
	if got, ok := w.Get(first.ID); ok {
		t.Errorf("released, and still %+v", got)
	}
	if got, ok := w.Get(second.ID); !ok || got != second {
		t.Errorf("the second is %+v, %v", got, ok)
	}
	defer func() {
		if recover() == nil {
			t.Error("a Release without a Hold was taken")
		}
	}()
	w.Release(second.ID)
}

// TestBurst makes and removes many cgroups concurrently, reusing names. The table then has the existing ones, and has
// reported each as often added as removed.
func TestBurst(t *testing.T) {
	w := run(t, Options{Root: subtree(t)})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 60 {
				a := filepath.Join(w.root, fmt.Sprintf("a%d", (i+n)%5))
				_ = os.Mkdir(a, 0o755) // another goroutine may have made it
				_ = os.Mkdir(filepath.Join(a, fmt.Sprintf("b%d.service", i)), 0o755)
				if n%3 > 0 {
					_ = syscall.Rmdir(filepath.Join(a, fmt.Sprintf("b%d.service", i)))
					_ = syscall.Rmdir(a)
				}
			}
		})
	}
	wg.Wait()
	w.mkdir("last")
	want := map[string]bool{}
	if err := filepath.WalkDir(w.root, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			rel, _ := filepath.Rel(w.root, p)
			want[filepath.Join("/", rel)] = true
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	there := map[string]ID{}
	for end := time.After(patience); there["/last"] == 0; {
		select {
		case c := <-w.changes:
			switch {
			case c.Gone && there[c.Cgroup] != c.ID:
				t.Fatalf("%s: %d is gone, and %d was there", c.Cgroup, c.ID, there[c.Cgroup])
			case c.Gone:
				delete(there, c.Cgroup)
			case there[c.Cgroup] != 0:
				t.Fatalf("%s: %d has come, and %d was there", c.Cgroup, c.ID, there[c.Cgroup])
			default:
				there[c.Cgroup] = c.ID
			}
		case <-end:
			t.Fatal("the last cgroup was not told of")
		}
	}
	for _, got := range w.All() {
		if !want[got.Cgroup] || got.ID != there[got.Cgroup] || got.Gone {
			t.Errorf("%+v is not there, or has number %d", got, there[got.Cgroup])
		}
		delete(want, got.Cgroup)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
}

// TestLostEvents changes cgroups while no events are read, and then compares, as after a queue overflow.
func TestLostEvents(t *testing.T) {
	root := subtree(t)
	for _, d := range []string{"a.service", "a.service/sub", "b.service", "c.service"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var told []string
	table, err := Open(Options{Root: root, Changed: func(c Workload) { told = append(told, fmt.Sprint(c.Cgroup, " ", c.Gone)) }})
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	table.tell()
	told = nil
	removeAll(t, filepath.Join(root, "a.service"))
	removeAll(t, filepath.Join(root, "b.service"))
	for _, d := range []string{"b.service", "d.service"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.compare(); err != nil {
		t.Fatal(err)
	}
	table.tell()
	slices.Sort(told)
	if want := []string{"/a.service true", "/a.service/sub true", "/b.service false", "/b.service true", "/d.service false"}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
}

// TestReplacedDuringScan replaces a cgroup by another of the same name during scan. Changes in the new one are then
// followed, although the old one was watched.
func TestReplacedDuringScan(t *testing.T) {
	root := subtree(t)
	table, err := Open(Options{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	path := filepath.Join(root, "a")
	mkdir := func(path string) {
		t.Helper()
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mkdir(path)
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	mkdir(path)
	if _, err := table.scanOne("/a", dir); err != nil && !gone(err) {
		t.Fatal(err)
	}
	if err := table.refresh("/a"); err != nil { // the event of the new one
		t.Fatal(err)
	}
	mkdir(filepath.Join(path, "b.service"))
	go func() { _ = table.Run(t.Context()) }()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if all := table.All(); len(all) == 3 && all[2].Cgroup == "/a/b.service" {
			return
		} else if time.Now().After(end) {
			t.Fatalf("known are %v, want /a/b.service among them", all)
		}
	}
}

// TestOpenRefuses checks the reasons in errors.
func TestOpenRefuses(t *testing.T) {
	if _, err := Open(Options{Root: t.TempDir()}); err == nil {
		t.Error("a directory that is no cgroup was taken")
	}
	if _, err := Open(Options{Root: filepath.Join(t.TempDir(), "none")}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want that it does not exist", err)
	}
	if _, err := Open(Options{Root: "/", File: "/nonexistent/names"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want that the file does not exist", err)
	}
}
