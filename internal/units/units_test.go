// SPDX-License-Identifier: Apache-2.0

package units

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/mountinfo"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"threads": threads})
	os.Exit(m.Run())
}

// threads runs with a second thread until the end of the test.
func threads([]string) error {
	started := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(started)
		select {}
	}()
	<-started
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func TestParseMountinfo(t *testing.T) {
	const v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
	const unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 master:2 - cgroup2 cgroup2 rw\n"
	for _, c := range []struct{ in, want string }{
		{v1 + unified, "/sys/fs/cgroup/unified"},
		{"41 31 0:38 / /sys/fs/cgroup rw - cgroup2 none rw\n", "/sys/fs/cgroup"},
		// A container's view of its own subtree beside the whole.
		{unified + "50 31 0:38 /docker/x /mnt/part rw - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified"},
		{"50 31 0:38 /../.. /mnt/part rw - cgroup2 cgroup2 rw\n", "/mnt/part"},
		{`60 31 0:38 / /mnt/a\040b\134c rw - cgroup2 cgroup2 rw` + "\n", `/mnt/a b\c`},
		// A similar name.
		{v1 + "70 31 0:40 / /mnt/x rw - tmpfs cgroup2 rw\n", ""},
		{"", ""},
		{"garbage - cgroup2 x rw\n", ""},
	} {
		if got, ok := cgroupRoot(mountinfo.Parse(c.in)); got != c.want || ok != (c.want != "") {
			t.Errorf("%q: got %q, %v; want %q", c.in, got, ok, c.want)
		}
	}
}

func TestCgroupDir(t *testing.T) {
	for in, want := range map[string]string{
		"/collectors/1":         "/cg/collectors/1",
		"collectors/1/":         "/cg/collectors/1",
		"/cg/collectors/1":      "/cg/collectors/1",
		"/cg":                   "/cg",
		"/":                     "/cg",
		"/cgroups/1":            "/cg/cgroups/1",
		"/../../etc":            "/cg/etc",
		"/cg/../../etc/passwd/": "/cg/etc/passwd",
	} {
		if got := cgroupDir("/cg", in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// root returns the hierarchy of this machine, or skips the test.
func root(t *testing.T) string {
	t.Helper()
	nstest.NeedRoot(t)
	dir, err := CgroupRoot()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("need: kernel with a cgroup2 mount; ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		t.Fatalf("%s has file system type %#x, %v; want cgroup2", dir, st.Type, err)
	}
	return dir
}

// mkcgroup creates a cgroup. Its cleanup removes it and the ones below.
func mkcgroup(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Just ended threads keep theirs for a moment.
		err := nstest.Poll(nstest.Timeout(), func() error {
			if err := unix.Rmdir(dir); !errors.Is(err, unix.ENOENT) {
				return err
			}
			return nil
		})
		if err != nil {
			t.Errorf("remove %s: %v", dir, err)
		}
	})
}

// startIn starts a process in a cgroup.
func startIn(t *testing.T, dir string) int {
	t.Helper()
	c := nstest.StartReady(t, nstest.Child("threads"))
	t.Cleanup(func() {
		if err := c.End(); err != nil {
			t.Error(err)
		}
	})
	// Not UseCgroupFD: clone3 into a cgroup requires Linux 5.7 and fails in threaded ones.
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(c.PID())), 0); err != nil {
		t.Fatal(err)
	}
	return c.PID()
}

func TestCgroupProcs(t *testing.T) {
	root := root(t)
	name := fmt.Sprintf("/weir-units-%d", os.Getpid())
	mkcgroup(t, root+name)
	mkcgroup(t, root+name+"/a")
	mkcgroup(t, root+name+"/a/b")
	if got, err := CgroupProcs(name); err != nil || len(got) != 0 {
		t.Errorf("empty: %v, %v", got, err)
	}
	want := []int{startIn(t, root+name+"/a/b"), startIn(t, root+name), startIn(t, root+name+"/a")}
	below := []int{want[0], want[2]}
	slices.Sort(want)
	slices.Sort(below)
	for path, want := range map[string][]int{
		name:                want,
		name[1:]:            want,
		root + name:         want,
		name + "/a":         below,
		root + name + "/a/": below,
	} {
		if got, err := CgroupProcs(path); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %v; want %v", path, got, err, want)
		}
	}
	for _, path := range []string{name + "/absent", name + "/cgroup.procs", name + "/cgroup.procs/x"} {
		if got, err := CgroupProcs(path); !errors.Is(err, errNoCgroup) {
			t.Errorf("%s: %v, %v; want ErrNoCgroup", path, got, err)
		}
	}
}

// TestCgroupProcsThreaded spreads the threads of a process over threaded cgroups.
func TestCgroupProcsThreaded(t *testing.T) {
	root := root(t)
	name := fmt.Sprintf("/weir-threads-%d", os.Getpid())
	mkcgroup(t, root+name)
	mkcgroup(t, root+name+"/t")
	if err := os.WriteFile(root+name+"/t/cgroup.type", []byte("threaded"), 0); err != nil {
		t.Fatal(err)
	}
	pid := startIn(t, root+name)
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads of the child: %v, %v; want several", tasks, err)
	}
	other := tasks[len(tasks)-1].Name() // the main thread comes first
	if err := os.WriteFile(root+name+"/t/cgroup.threads", []byte(other), 0); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{name + "/t", name} {
		if got, err := CgroupProcs(path); err != nil || !slices.Equal(got, []int{pid}) {
			t.Errorf("%s: %v, %v; want %d", path, got, err, pid)
		}
	}
}

func TestReadPIDFile(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]int{"4711": 4711, "4711\n": 4711, " 4711 \r\n": 4711, "7\n/var/lib/pg\n5432\n": 7, "4194304": 1 << 22} {
		file := filepath.Join(dir, "good")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadPIDFile(file); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"": "is empty", "\n7\n": "is empty", "nfacctd\n": "want a process id", "0": "want a process id", "-1": "want a process id", "4194305": "want a process id",
		strings.Repeat("9", 1<<20): "more than 4096 bytes",
	} {
		file := filepath.Join(dir, "bad")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadPIDFile(file); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%.20q: %d, %v; want %q and the file's name", text, got, err, want)
		} else if len(err.Error()) > 300 {
			t.Errorf("%.20q: an error of %d bytes", text, len(err.Error()))
		}
	}
	if _, err := ReadPIDFile(dir + "/absent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	if _, err := ReadPIDFile(dir); err == nil {
		t.Error("a directory was read")
	}
}

// TestPIDFileOwner checks that a user's pid file names only the user's own processes, and root's
// any. Errors never quote a rejected file.
func TestPIDFileOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	const user = 65534
	theirs := exec.Command("sleep", "60")
	theirs.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	if err := theirs.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = theirs.Process.Kill()
		_ = theirs.Wait()
	})
	file := filepath.Join(t.TempDir(), "pid")
	for _, c := range []struct {
		owner int
		mode  os.FileMode
		pid   int
		want  string
	}{
		{0, 0o644, os.Getpid(), ""}, {0, 0o644, theirs.Process.Pid, ""}, {0, 0o664, theirs.Process.Pid, ""},
		{user, 0o644, theirs.Process.Pid, ""}, {user, 0o644, os.Getpid(), "only root's file may name another user's process"},
		{user, 0o644, 1, "only root's file"}, {0, 0o666, os.Getpid(), "world-writable"}, {user, 0o644, maxPID, ""}, // not running any more
	} {
		if err := errors.Join(os.WriteFile(file, fmt.Append(nil, c.pid, "\n"), 0o600), os.Chmod(file, c.mode), os.Chown(file, c.owner, c.owner)); err != nil {
			t.Fatal(err)
		}
		pid, err := ReadPIDFile(file)
		switch {
		case c.want == "" && (err != nil || pid != c.pid):
			t.Errorf("owner %d, mode %o, process %d: %d, %v", c.owner, c.mode, c.pid, pid, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("owner %d, mode %o, process %d: %d, %v; want %q", c.owner, c.mode, c.pid, pid, err, c.want)
		}
	}
	// A user's link to a file readable only by root, and a FIFO: both fail at once without a quote.
	shadow := file + ".secret"
	if err := errors.Join(os.WriteFile(shadow, []byte("root:$6$salt:20228\n"), 0o600), os.Remove(file), os.Symlink(shadow, file), os.Lchown(file, user, user)); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPIDFile(file); err == nil || strings.Contains(err.Error(), "salt") || !strings.Contains(err.Error(), "symbolic link of user 65534") {
		t.Errorf("a link: %v", err)
	}
	if err := errors.Join(os.Remove(file), unix.Mkfifo(file, 0o666)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := ReadPIDFile(file); done <- err }()
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "FIFO") {
			t.Errorf("a FIFO: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a FIFO as pid file is waited for")
	}
}

func TestIsInitPIDNamespace(t *testing.T) {
	link, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	if got := IsInitPIDNamespace(); got != (link == "pid:[4026531836]") {
		t.Errorf("got %v in %s", got, link)
	}
}

func TestNoSystemd(t *testing.T) {
	if booted() {
		nstest.Enter(t)
		if err := unix.Mount("tmpfs", "/run/systemd", "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	_, err := UnitMain(context.Background(), "nfacctd@0")
	if !errors.Is(err, ErrNoSystemd) || !strings.Contains(err.Error(), "nfacctd@0.service") {
		t.Errorf("got %v, want ErrNoSystemd and the unit's full name", err)
	}
}
