// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) } // in its own mount namespace

// TestWithin checks that a hanging call is awaited once and occupies one thread.
func TestWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var calls atomic.Int32
		ask := func(key string) error {
			_, err := Within(key, func() (int, error) { calls.Add(1); <-release; return 0, nil })
			return err
		}
		for i, want := range []time.Duration{readTime, 0, 0} {
			began := time.Now()
			if err := ask("a"); !errors.Is(err, ErrRefused) || time.Since(began) != want {
				t.Errorf("call %d: %v after %v, want %v", i, err, time.Since(began), want)
			}
		}
		if err := ask("b"); !errors.Is(err, ErrRefused) || calls.Load() != 2 {
			t.Errorf("%v, %d calls, want 2", err, calls.Load())
		}
		close(release)
		synctest.Wait()
		if err := ask("a"); err != nil {
			t.Errorf("once it answers: %v", err)
		}
	})
}

// TestWithinTurns checks that concurrent readers of one file all succeed, as agents of one process
// need.
func TestWithinTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var under, done atomic.Int32
		for range 8 {
			go func() {
				_, err := Within("a", func() (int, error) {
					if under.Add(1) > 1 {
						t.Error("two calls at once")
					}
					time.Sleep(readTime / 10)
					under.Add(-1)
					return 0, nil
				})
				if err != nil {
					t.Error(err)
				}
				done.Add(1)
			}()
		}
		time.Sleep(readTime)
		if done.Load() != 8 {
			t.Errorf("%d calls, want 8", done.Load())
		}
	})
}

// TestWithinTurnIsBounded checks that a waiting call fails when its predecessor counts as hung, or
// after its own wait of that length.
func TestWithinTurnIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		hang := func() (int, error) { <-release; return 0, nil }
		go func() { _, _ = Within("a", hang) }()
		time.Sleep(readTime / 2)
		began := time.Now()
		if _, err := Within("a", hang); !errors.Is(err, ErrRefused) || time.Since(began) != readTime/2 {
			t.Errorf("behind a hanging call: %v after %v", err, time.Since(began))
		}
		close(release)
	})
}

// TestFileSystemOfUser checks that another user's file system is rejected without any call to it.
// The one in the test never answers.
func TestFileSystemOfUser(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("need: kernel FUSE:", err)
	}
	defer unix.Close(fd) // ends the file system and all waits for it
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=65534,group_id=0,allow_other", fd)
	if err := unix.Mount("none", dir, "fuse", 0, data); err != nil {
		t.Skip("need: kernel FUSE:", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	began := time.Now()
	for range 3 {
		_, err := Read(filepath.Join(dir, "x.pid"), 64)
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "file system of user 65534") {
			t.Errorf("%v", err)
		}
		if _, err := Stat(filepath.Join(dir, "below", "x")); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "file system of user 65534") {
			t.Errorf("%v", err)
		}
	}
	if took := time.Since(began); took > readTime {
		t.Errorf("it took %v", took)
	}
}

func TestFuseUser(t *testing.T) {
	const mounts = `23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 23 0:26 / /run rw shared:5 - tmpfs tmpfs rw,size=1024k
40 23 0:51 / /home/a/x rw,nosuid - fuse.sshfs b:/ rw,user_id=1000,group_id=1000,allow_other
41 23 0:52 / /var/lib/lxcfs rw - fuse.lxcfs lxcfs rw,user_id=0,group_id=0,allow_other
42 23 8:1 / /mnt rw - fuseblk /dev/sda1 rw,user_id=7,group_id=0
`
	for device, want := range map[string]string{"254:0": "0 false", "0:26": "0 false", "0:51": "1000 true", "0:52": "0 true", "8:1": "7 true", "9:9": "0 false"} {
		uid, ok := fuseUser(mounts, device)
		if got := fmt.Sprint(uid, " ", ok); got != want {
			t.Errorf("%s: %s, want %s", device, got, want)
		}
	}
}

// TestFilesOfKernel checks files of /proc and /sys, because reading them may have effects or wait.
func TestFilesOfKernel(t *testing.T) {
	for _, path := range []string{"/proc/kmsg", fmt.Sprintf("/proc/%d/status", os.Getpid()), "/sys/kernel/notes", "/proc/self/root/proc/version"} {
		if _, err := Read(path, 1<<20); !errors.Is(err, ErrRefused) && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestStat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if _, err := Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if err := os.WriteFile(path, []byte("12345"), 0o644); err != nil {
		t.Fatal(err)
	}
	if s, err := Stat(path); err != nil || s.Size != 5 || s.Changed.IsZero() {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestInputWaits checks that Input waits for a FIFO without a writer, as a shell's <(command)
// requires, and reports the wait.
func TestInputWaits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	before := tellAfter
	tellAfter = 10 * time.Millisecond
	defer func() { tellAfter = before }()
	told := make(chan string, 10)
	OnWait(func(text string) { told <- text })
	read := make(chan error, 1)
	go func() {
		_, data, err := Input(file, 1<<20)
		if err == nil && string(data) != "late" {
			err = fmt.Errorf("%q", data)
		}
		read <- err
	}()
	if text, want := <-told, "waiting for a writer of FIFO "+file; text != want {
		t.Errorf("got %q, want %q", text, want)
	}
	if err := os.WriteFile(file, []byte("late"), 0); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != nil {
		t.Error(err)
	}
}
