// SPDX-License-Identifier: Apache-2.0

package units

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxPID is the largest process id of any Linux (PID_MAX_LIMIT).
const maxPID = 1 << 22

// ReadPIDFile reads the process id on the first line of a file. Whether a
// process of that id runs, and whether it is the one meant, it does not say. A
// file that is missing gives an error that wraps [os.ErrNotExist].
func ReadPIDFile(path string) (int, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("pid file %s does not exist; is the daemon running, and does it write one? %w", path, os.ErrNotExist)
	}
	if err != nil {
		return 0, fmt.Errorf("pid file: %w", err)
	}
	defer f.Close()
	// A wrong path may be a log of gigabytes; no pid is longer than this.
	data, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return 0, fmt.Errorf("pid file: %w", err)
	}
	first, _, _ := bytes.Cut(data, []byte("\n"))
	text := strings.TrimSpace(string(first))
	if text == "" {
		return 0, fmt.Errorf("pid file %s is empty; the daemon may still be starting", path)
	}
	pid, err := strconv.Atoi(text)
	if err != nil || pid <= 0 || pid > maxPID {
		return 0, fmt.Errorf("pid file %s: want a process id on its first line, got %q", path, text)
	}
	return pid, nil
}

// IsInitPIDNamespace tells whether process ids here are the kernel's own, which
// BPF programs see, and not those of a container.
func IsInitPIDNamespace() bool {
	const initInode = 0xEFFFFFFC // PROC_PID_INIT_INO, linux/proc_ns.h
	var st unix.Stat_t
	return unix.Stat("/proc/self/ns/pid", &st) == nil && st.Ino == initInode
}
