// SPDX-License-Identifier: Apache-2.0

package pidfd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/safefile"
)

// maxCommandLine is the maximum length read of a command line, in bytes.
const maxCommandLine = 128 << 10

// CommandLine returns a process's arguments, at most 128 KiB. They are in the process's own memory,
// so their contents are arbitrary, and the read may block. If that memory maps a file of the user's
// own file system (FUSE), CommandLine fails after a while.
func CommandLine(pid int) ([]string, error) {
	path := fmt.Sprintf("/proc/%d/cmdline", pid)
	return safefile.Within(path, func() ([]string, error) {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
		}
		if err != nil {
			return nil, err
		}
		defer f.Close()
		b, err := io.ReadAll(io.LimitReader(f, maxCommandLine))
		if errors.Is(err, unix.ESRCH) {
			return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
		}
		if err != nil || len(b) == 0 {
			return nil, err
		}
		return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00"), nil
	})
}
