// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// keptPath is a file beside the records of all file systems at the root's path: it outlives the loss of the pins, and goes
// with /run at a reboot.
func (r *Root) keptPath(name string) string { return filepath.Join(r.recordsPath(), "+"+name) }

// Kept reads what Keep wrote; nil where there is nothing.
func (r *Root) Kept(name string) ([]byte, error) {
	b, err := os.ReadFile(r.keptPath(name))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case errors.Is(err, os.ErrPermission):
		return nil, r.unreadable(r.keptPath(name))
	}
	return b, err
}

// Keep writes a text beside the pins, in one step. Unlike a record it is no aid: without it the caller must not go on.
func (l *WriteLock) Keep(name string, text []byte) error {
	dir := l.recordsPath()
	err := l.makeRecords(dir)
	if err == nil {
		err = l.writeFile(l.keptPath(name), text)
	}
	if err != nil {
		return fmt.Errorf("keeping the %s in %s: %w", name, dir, err)
	}
	return nil
}

// Forget removes what Keep wrote.
func (l *WriteLock) Forget(name string) error {
	err := os.Remove(l.keptPath(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	_ = os.Remove(l.recordsPath()) // fails unless empty, as it should
	return err
}

// BootID names this boot of the host.
func BootID() string { return bootID() }

// Boottime is CLOCK_BOOTTIME in nanoseconds: nobody sets it, and it goes on while the host sleeps.
func Boottime() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return Monotonic() // cannot fail for this clock
	}
	return uint64(ts.Nano())
}
