// SPDX-License-Identifier: Apache-2.0

package confined

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Open opens path, a file or directory below base, with O_PATH. It follows no link below base: a link is an error. It
// needs openat2(2), Linux 5.6.
func Open(base, path string) (*os.File, error) {
	rel, err := filepath.Rel(base, path)
	if err != nil {
		return nil, err
	}
	b, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: base, Err: err}
	}
	defer unix.Close(b)
	fd, err := unix.Openat2(b, rel, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link, or below one: remove it", path)
	} else if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Name returns a name of an open file for calls that take only names. Nobody can exchange the file behind it.
func Name(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
