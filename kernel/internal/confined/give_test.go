// SPDX-License-Identifier: Apache-2.0

package confined

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The owner of a directory may exchange a file for a link, or for a second name of another file, at any time. The other
// file keeps its rights.
func TestGiveWhileExchanged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	const user = 65534
	base, vault := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	for _, plant := range []func(at string) error{
		func(at string) error { return os.Symlink(vault, at) },
		func(at string) error { return os.Link(vault, at) },
	} {
		if err := os.WriteFile(vault, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		path, trap := filepath.Join(base, "file"), filepath.Join(base, "trap")
		if err := errors.Join(os.WriteFile(path, nil, 0o600), plant(trap)); err != nil {
			t.Fatal(err)
		}
		var ended atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			for !ended.Load() {
				_ = unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, trap, unix.RENAME_EXCHANGE)
			}
		}()
		given := 0
		for until := time.Now().Add(500 * time.Millisecond); time.Now().Before(until); {
			owner := user + given%2 // each time another, so there is always something to change
			if err := (Dirs{base}).Give(path, 0o640, owner, owner); err == nil {
				given++
			} else if !strings.Contains(err.Error(), "symbolic link") && !strings.Contains(err.Error(), "second name") {
				t.Fatal(err)
			}
		}
		ended.Store(true)
		<-done
		if st, err := os.Lstat(vault); err != nil || st.Mode().Perm() != 0o600 || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("the secret is now %v, %v", st, err)
		}
		if given == 0 {
			t.Error("no file was given")
		}
		if err := errors.Join(os.Remove(path), os.Remove(trap), os.RemoveAll(vault)); err != nil {
			t.Fatal(err)
		}
	}
}
