// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// playHold holds the lock of a root until the end of its input.
func playHold(f []string) error {
	l, err := OpenRoot(f[0]).Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// playCount adds 1 to the number in a file, under the lock: ROOT FILE TIMES.
func playCount(f []string) error {
	times, err := strconv.Atoi(f[2])
	if err != nil {
		return err
	}
	for range times {
		if err := countOnce(OpenRoot(f[0]), f[1]); err != nil {
			return err
		}
	}
	return nil
}

func countOnce(r *Root, file string) error {
	l, err := r.Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(string(b))
	if err != nil {
		return err
	}
	return os.WriteFile(file, fmt.Append(nil, n+1), 0o600)
}

// holder starts a process with the lock. end releases it.
func holder(t *testing.T, r *Root) (c *nstest.Process, end func()) {
	t.Helper()
	c = nstest.StartReady(t, nstest.Child("hold", r.path))
	return c, func() { c.End() }
}

func TestLockWaits(t *testing.T) {
	r := newRoot(t)
	p, end := holder(t, r)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err := r.Lock(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (", p.PID())) || !strings.Contains(err.Error(), "holds the lock on "+r.path) {
		t.Errorf("lock that another process holds: %v", err)
	}
	got := make(chan error)
	go func() {
		l, err := r.Lock(t.Context())
		if err == nil {
			l.Unlock()
		}
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatalf("both hold the lock: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	// The holder removes the empty root. A waiting process must not end up with the removed one.
	end()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestLockOfAKilledHolder(t *testing.T) {
	r := newRoot(t)
	c, end := holder(t, r)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	end()
	lock(t, r).Unlock()
	if left := tree(t, r); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

// Every Unlock here removes the empty root while others wait for its lock.
func TestLockExcludes(t *testing.T) {
	const each = 50
	r := newRoot(t)
	file := filepath.Join(t.TempDir(), "count")
	if err := os.WriteFile(file, []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	var others []*exec.Cmd
	for range 2 {
		c := nstest.Child("count", r.path, file, each)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		others = append(others, c)
	}
	var own sync.WaitGroup
	for range 2 { // two goroutines exclude each other too
		own.Go(func() {
			for range each {
				if err := countOnce(r, file); err != nil {
					t.Error(err)
				}
			}
		})
	}
	own.Wait()
	for _, c := range others {
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	}
	if b, _ := os.ReadFile(file); string(b) != strconv.Itoa(4*each) {
		t.Errorf("counted to %s, want %d", b, 4*each)
	}
	if left := tree(t, r); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

// The lock is always on the existing root, despite concurrent removals and creations. Lock runs without its pause
// between tries.
func TestLockIsOnTheRootThatIsThere(t *testing.T) {
	r := newRoot(t)
	var holders, locks atomic.Int64
	least, most := time.Now().Add(300*time.Millisecond), time.Now().Add(60*time.Second)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for now := time.Now(); now.Before(least) || locks.Load() < 10 && now.Before(most); now = time.Now() {
				if err := r.ensure(); err != nil {
					t.Error(err)
					return
				}
				l, err := r.tryLock()
				if err != nil {
					t.Error(err)
					return
				}
				if l == nil {
					continue
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d hold the lock", n)
				}
				if _, err := os.Stat(r.path); err != nil {
					t.Errorf("locked a root that is gone: %v", err)
				}
				locks.Add(1)
				holders.Add(-1)
				l.Unlock()
			}
		})
	}
	all.Wait()
	if locks.Load() < 10 {
		t.Errorf("locked only %d times", locks.Load())
	}
}

func TestUnlockKeepsWhatIsThere(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	l.Unlock() // harmless
	wantVersion(t, r, instance, 1)
	l = lock(t, r)
	defer l.Unlock()
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

func TestOpenRoot(t *testing.T) {
	t.Setenv("WEIR_ROOT", "")
	if got := OpenRoot("").Path(); got != DefaultRoot {
		t.Errorf("default root %s", got)
	}
	t.Setenv("WEIR_ROOT", "/sys/fs/bpf/other/")
	if got := OpenRoot("").Path(); got != "/sys/fs/bpf/other" {
		t.Errorf("root of the environment %s", got)
	}
	if got := OpenRoot("/sys/fs/bpf/third").Path(); got != "/sys/fs/bpf/third" {
		t.Errorf("root of the argument %s", got)
	}
}

// A root on another file system is rejected. The remedy hides nothing: it never names a non-empty directory.
func TestRootMustBeOnBPFFS(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	empty, full := filepath.Join(dir, "empty"), filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "something"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, remedy := range map[string]string{
		filepath.Join(dir, "weir"):        "mkdir -p %[1]s && mount -t bpf bpf %[1]s",
		filepath.Join(dir, "absent/weir"): "mkdir -p %[1]s && mount -t bpf bpf %[1]s",
		empty:                             "mount -t bpf bpf %[1]s",
		full:                              "",
	} {
		l, err := OpenRoot(path).Lock(t.Context())
		if !errors.Is(err, ErrNotBPFFS) || !strings.Contains(err.Error(), "name a path below /sys/fs/bpf") {
			t.Errorf("%s: %v, %v; want ErrNotBPFFS and a better path", path, l, err)
			continue
		}
		if _, told, _ := strings.Cut(err.Error(), "create a file system there: "); remedy == "" && strings.Contains(err.Error(), "mount") ||
			remedy != "" && told != fmt.Sprintf(remedy, path) {
			t.Errorf("%s: %v; want the remedy %q", path, err, remedy)
		}
	}
	if e, err := os.ReadDir(dir); err != nil || len(e) != 2 {
		t.Errorf("left over: %v, %v", e, err)
	}
	// The remedy works.
	if err := unix.Mount("bpf", empty, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(empty, unix.MNT_DETACH)
	l := lock(t, OpenRoot(empty))
	if err := publish(l, instance, 1); err != nil {
		t.Error(err)
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
	l.Unlock()
}

// bpffs rejects names with dots with EPERM. Readers and writers report the cause.
func TestRootWithDots(t *testing.T) {
	nstest.NeedRoot(t)
	for path, want := range map[string]string{
		DefaultRoot + ".d":                    `rejects names with dots: rename "weir.d", for example to "weir-d"`,
		filepath.Join("/sys/fs/bpf/a.b", "c"): `rejects names with dots: rename "a.b", for example to "a-b"`,
	} {
		r := OpenRoot(path)
		if l, err := r.Lock(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: a writer is told %v, %v; want %q", path, l, err, want)
		}
		if _, err := r.Instances(""); err == nil || !strings.Contains(err.Error(), want) || errors.Is(err, ErrUnreadable) {
			t.Errorf("%s: a reader is told %v; want %q", path, err, want)
		}
	}
	if err := OpenRoot(filepath.Join(t.TempDir(), "b.pf", "weir")).CheckName(); err != nil {
		t.Errorf("a dot above the BPF file system: %v", err)
	}
}

// Pins made under ip netns exec would end with it.
func TestLockUnderIPNetnsExec(t *testing.T) {
	nstest.Enter(t)
	ns, err := netns.Create("weir-exec")
	if err != nil {
		t.Fatal(err)
	}
	ns.Close()
	defer netns.Delete("weir-exec")
	if err := unix.Mount("weir-exec", "/sys", "sysfs", 0, ""); err != nil { // like ip
		t.Fatal(err)
	}
	defer unix.Unmount("/sys", unix.MNT_DETACH)
	_, err = OpenRoot(DefaultRoot).Lock(context.Background())
	if err == nil || !strings.Contains(err.Error(), "--netns weir-exec") {
		t.Errorf("%v", err)
	}
	if all, err := OpenRoot(DefaultRoot).Instances(""); !errors.Is(err, ErrUnreadable) || !strings.Contains(err.Error(), "ip netns exec weir-exec") {
		t.Errorf("instances are listed as if there were none: %v, %v", all, err)
	}
}

// Minimal systems mount no bpffs: the first command does.
func TestLockMountsBPFFS(t *testing.T) {
	nstest.Enter(t)
	mounted := func() bool {
		var fs unix.Statfs_t
		return unix.Statfs(nstest.BPFFS, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
	}
	for mounted() {
		if err := unix.Unmount(nstest.BPFFS, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	r := OpenRoot(DefaultRoot)
	if all, err := r.Instances(""); err != nil || len(all) != 0 {
		t.Errorf("reading without a bpffs: %v, %v", all, err)
	}
	l := lock(t, r)
	if !mounted() {
		t.Error("no bpffs is mounted")
	}
	if err := publish(l, instance, 1); err != nil {
		t.Error(err)
	}
	wantVersion(t, r, instance, 1)
	l.Unlock()
	if err := unix.Unmount(nstest.BPFFS, unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
}
