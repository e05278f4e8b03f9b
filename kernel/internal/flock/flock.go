// SPDX-License-Identifier: Apache-2.0

// Package flock takes locks of flock(2), and names their owners.
package flock

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/pidfd"
)

// Try reports whether it got the lock on an open directory.
func Try(dir *os.File) (bool, error) {
	err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// Owner returns the PID of a directory's flock owner in /proc/locks (proc_locks(5)).
func Owner(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	st := info.Sys().(*syscall.Stat_t)
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(locks)) {
		if f := strings.Fields(line); len(f) >= 6 && f[1] == "FLOCK" && f[5] == file {
			return f[4]
		}
	}
	return ""
}

// Command returns the command line of a process as one printable line.
func Command(pid string) string {
	n, _ := strconv.Atoi(pid) // 0 has none
	args, err := pidfd.CommandLine(n)
	if err != nil || len(args) == 0 {
		return "it has exited"
	}
	text := strings.Join(args, " ")
	if len(text) > 80 {
		text = text[:80] + "…"
	}
	return strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c >= 0x80 && c < 0xa0 {
			return '?'
		}
		return c
	}, strings.ToValidUTF8(text, "?"))
}
