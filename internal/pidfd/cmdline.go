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

// maxCommandLine bounds what is read of a command line, bytes.
const maxCommandLine = 128 << 10

// CommandLine is a process's arguments, of at most 128 KiB. They lie in the process's own memory, so it says what it likes, and
// may make the reader wait: where that memory is a mapping of a file system of its own (FUSE), the error says so after a while.
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
