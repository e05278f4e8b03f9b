// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// heard waits for a change. quiet expects none.
func heard(t *testing.T, c *Changes, quiet bool) {
	t.Helper()
	wait := 30 * time.Second
	if quiet {
		wait = 100 * time.Millisecond
	}
	select {
	case <-c.C:
		if quiet {
			t.Fatal("a change, though nothing was locked")
		}
	case <-time.After(wait):
		if !quiet {
			t.Fatal("no change was heard")
		}
	}
}

func TestChanges(t *testing.T) {
	r := newRoot(t)
	c, err := r.Changes() // before there is a lock to watch
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Renew(); err != nil {
		t.Fatal(err)
	}
	heard(t, c, false) // the first lock: it might have been released already
	heard(t, c, true)
	keep := filepath.Join(r.path, "1", "steer")
	if err := os.MkdirAll(filepath.Join(keep, "x"), 0o750); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	heard(t, c, false)

	for range 3 {
		if err := c.Renew(); err != nil { // the same directory: a change is reported once
			t.Fatal(err)
		}
	}
	if _, err := r.Instances("steer"); err != nil { // readers are not reported
		t.Fatal(err)
	}
	heard(t, c, true)
	if l, err = r.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	heard(t, c, false)
	heard(t, c, true)
}

// A change before the first look at a new root is reported by that look.
func TestChangesBeforeTheFirstLook(t *testing.T) {
	r := newRoot(t)
	c, err := r.Changes()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(r.path, "1", "steer", "x"), 0o750); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	if err := c.Renew(); err != nil {
		t.Fatal(err)
	}
	heard(t, c, false)
	heard(t, c, true)
}
