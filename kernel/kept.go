// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/weir-project/weir/kernel/internal/confined"
	"golang.org/x/sys/unix"
)

// maxLarge is the limit of a text written by KeepLarge, in bytes. The saved state of a host has the prefixes of its
// lists: 20 MB for a million of IPv4.
const maxLarge = 256 << 20

// KeptPath returns the file of a text written by Keep, beside the records of all file systems at the root's path. The
// file survives a loss of the pins. It goes with /run at a reboot.
func (r *Root) KeptPath(name string) string { return filepath.Join(r.recordsPath(), "+"+name) }

// Kept reads a text written by Keep; nil if there is none.
func (r *Root) Kept(name string) ([]byte, error) {
	b, err := r.files().ReadFile(r.KeptPath(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return b, r.explainKept(name, err)
}

// KeptLarge opens a text written by KeepLarge; nil if there is none. The caller closes it.
func (r *Root) KeptLarge(name string) (f *os.File, size int64, err error) {
	if f, err = r.files().OpenFile(r.KeptPath(name), os.O_RDONLY, 0); errors.Is(err, os.ErrNotExist) {
		return nil, 0, nil
	} else if err != nil {
		return nil, 0, r.explainKept(name, err)
	}
	st, err := f.Stat()
	if err == nil && st.Size() > maxLarge {
		err = fmt.Errorf("more than %d MiB", maxLarge>>20)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

func (r *Root) explainKept(name string, err error) error {
	if errors.Is(err, os.ErrPermission) {
		return r.unreadable(r.KeptPath(name))
	}
	return err
}

// Keep writes a text beside the pins atomically. Unlike a record it is required: after an error the caller must not
// continue. A text has at most 16 MiB, because status reads it, and its file belongs to the owner of the pins.
func (l *WriteLock) Keep(name string, text []byte) error {
	return l.keep(name, confined.MaxFile, func(w io.Writer) error { _, err := w.Write(text); return err })
}

// KeepLarge is Keep for texts of up to 256 MiB, written by write.
func (l *WriteLock) KeepLarge(name string, write func(io.Writer) error) error {
	return l.keep(name, maxLarge, write)
}

func (l *WriteLock) keep(name string, most int, write func(io.Writer) error) error {
	err := l.makeRecords(l.recordsPath())
	if err == nil {
		err = l.files().ReplaceBy(l.KeptPath(name), most, write, func(next string) error { return l.setRights(next, false, l.gid()) })
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", l.KeptPath(name), err)
	}
	return nil
}

// Forget removes a text written by Keep, or anything in its place.
func (l *WriteLock) Forget(name string) error {
	if _, err := os.Lstat(l.KeptPath(name)); errors.Is(err, os.ErrNotExist) {
		return nil // a read-only file system would be an error otherwise
	}
	if err := l.files().RemoveAll(l.KeptPath(name)); err != nil {
		if inner, ok := errors.AsType[*os.PathError](err); ok {
			err = inner.Err // its path is relative
		}
		return fmt.Errorf("remove %s: %w: remove it by hand: rm -r '%[1]s'", l.KeptPath(name), err)
	}
	_ = l.files().Remove(l.recordsPath()) // fails unless empty, as intended
	return nil
}

// BootID returns the ID of this boot of the host.
func BootID() string { return bootID() }

// Boottime returns CLOCK_BOOTTIME in ns. It cannot be set, and it advances during suspend.
func Boottime() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return Monotonic() // cannot fail for this clock
	}
	return uint64(ts.Nano())
}
