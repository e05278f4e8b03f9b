// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// playFlock locks a directory until the end of its input, as any user with access could: PATH.
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

// flocker starts a process that locks a directory, and returns its output.
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

// A reader of the pins can lock the root without an effect on writers.
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
	if said, end = flocker(t, r.dir(instance), cred); said != "locked" {
		t.Fatalf("a reader of the instance says %q", said)
	}
	for range 2 {
		release, ok, err := r.Claim(instance)
		if err != nil || !ok {
			t.Fatalf("with a reader's lock on the instance: no claim, %v", err)
		}
		if _, ok, err := r.Claim(instance); ok || err != nil {
			t.Errorf("claimed twice, %v", err)
		}
		release()
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
