// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Any user can hold the lock of the directory of names.
func TestHeldLockOfNames(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	dir := t.TempDir()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- prepareDir(dir) }()
	select {
	case err = <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("still waiting for the lock")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	begin := time.Now()
	if err := prepareDir(dir); err != nil || time.Since(begin) > 500*time.Millisecond {
		t.Errorf("a shared mount needs no lock: %v after %v", err, time.Since(begin))
	}
}
