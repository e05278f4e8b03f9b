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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// playFlock locks a directory as anybody could who may open it, until its input
// ends: PATH.
func playFlock(f []string) error {
	dir, err := os.Open(f[0])
	if err == nil {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		fmt.Println(err)
		return nil
	}
	fmt.Println("locked")
	_, err = io.Copy(io.Discard, os.Stdin)
	dir.Close()
	return err
}

// playOldCount is playCount of a weir before there was a lock directory: ROOT
// FILE TIMES.
func playOldCount(f []string) error {
	times, err := strconv.Atoi(f[2])
	if err != nil {
		return err
	}
	for range times {
		dir, err := oldLock(f[0])
		if err != nil {
			return err
		}
		b, err := os.ReadFile(f[1])
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(string(b))
		if err != nil {
			return err
		}
		if err := os.WriteFile(f[1], fmt.Append(nil, n+1), 0o600); err != nil {
			return err
		}
		// It removed what was empty, the root and what it did not know.
		os.Remove(filepath.Join(f[0], lockDir))
		os.Remove(f[0])
		dir.Close()
	}
	return nil
}

func oldLock(root string) (*os.File, error) {
	for ; ; time.Sleep(5 * time.Millisecond) {
		if err := os.Mkdir(root, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
		dir, err := os.Open(root)
		if errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		if unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			held, err := dir.Stat()
			if err != nil {
				return nil, err
			}
			if now, err := os.Stat(root); err == nil && os.SameFile(held, now) {
				return dir, nil
			}
		}
		dir.Close()
	}
}

// flocker starts a process that locks a directory; it returns what it said.
func flocker(t *testing.T, path string, cred *syscall.Credential) (said string, end func()) {
	t.Helper()
	c := nstest.Child("flock", path)
	c.Dir = "/"
	c.SysProcAttr.Credential = cred
	p := nstest.Start(t, c)
	said, ok := p.Line()
	if !ok {
		t.Fatalf("the locker said nothing: %v", p.End())
	}
	return said, func() { p.End() }
}

// Who may read the pins can lock the root, and nobody cares.
func TestReadersCannotBlockWriters(t *testing.T) {
	others(t)
	r := newRoot(t)
	l := lock(t, r)
	if err := errors.Join(publish(l, instance, 1), l.SetGroup(readers)); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	cred := &syscall.Credential{Uid: nobody, Gid: readers}
	said, end := flocker(t, r.path, cred)
	if said != "locked" {
		t.Fatalf("a reader of the root says %q", said)
	}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		l, err := r.Lock(ctx)
		cancel()
		if err != nil {
			t.Fatalf("with a reader's lock on the root: %v", err)
		}
		l.Unlock()
	}
	end()
	if said, _ := flocker(t, filepath.Join(r.path, lockDir), cred); said == "locked" {
		t.Error("a reader can take the write lock")
	}
	if l, err := r.Lock(t.Context()); err != nil {
		t.Error(err)
	} else {
		if err := l.Remove(instance); err != nil {
			t.Error(err)
		}
		l.Unlock()
	}
}

// A weir that locks the root alone is waited for.
func TestLockWaitsForAnOlderWeir(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	// It would have given the lock's directory to the group.
	if err := os.Chmod(filepath.Join(r.path, lockDir), 0o750); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	_, end := flocker(t, r.path, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.Lock(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("beside an older weir: %v", err)
	}
	end()
	l = lock(t, r)
	defer l.Unlock()
	if st, err := os.Stat(filepath.Join(r.path, lockDir)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the lock's directory: %v, %v", st, err)
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

// Commands of both kinds exclude each other, though each removes an empty root
// under the other's eyes.
func TestLockExcludesOlderWeirs(t *testing.T) {
	const each = 40
	r := newRoot(t)
	file := filepath.Join(t.TempDir(), "count")
	if err := os.WriteFile(file, []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	var all []*exec.Cmd
	for _, role := range []string{"count", "oldcount", "count", "oldcount"} {
		c := nstest.Child(role, r.path, file, each)
		c.Stdout = os.Stdout
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	for _, c := range all {
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	}
	if b, _ := os.ReadFile(file); string(b) != strconv.Itoa(4*each) {
		t.Errorf("counted to %s, want %d", b, 4*each)
	}
}
