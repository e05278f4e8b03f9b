// SPDX-License-Identifier: Apache-2.0

package pidfd

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Info is data of a process from /proc (proc_pid_stat(5)).
type Info struct {
	Comm      string // name of the main thread, at most 15 arbitrary bytes
	PPID      int    // 0 if the parent is outside this pid namespace
	State     byte   // R, S, D, T, Z…
	StartTime uint64 // clock ticks (1/100 s) since boot; with the pid, unique for a boot
	UID       uint32 // effective user
}

// Info reads name, parent, state, start time and user of the process, also of a zombie. The error
// wraps [ErrGone] after the process was reaped.
func (p *Process) Info() (Info, error) {
	info, err := readStat(p.pid)
	if err == nil {
		info.UID, err = effectiveUID(p.pid)
	}
	// Check after reading: only then the data is certainly about this process.
	if p.reaped() {
		return Info{}, p.gone()
	}
	if err != nil {
		return Info{}, err
	}
	return info, nil
}

// StartTime returns the start of a process in clock ticks (1/100 s) since boot. Pid and start time
// together identify a process until the next boot, also across our own restarts. The error wraps
// [ErrGone] if there is no such process.
func StartTime(pid int) (uint64, error) {
	info, err := readStat(pid)
	return info.StartTime, err
}

func readStat(pid int) (Info, error) {
	data, err := Ask(pid, func() ([]byte, error) { return readProc(pid, "stat") }, nil)
	if err != nil {
		return Info{}, err
	}
	info, err := parseStat(string(data))
	if err != nil {
		return Info{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return info, nil
}

// parseStat parses "pid (comm) state ppid …". The name may contain spaces and parentheses, so it
// ends at the last one.
func parseStat(s string) (Info, error) {
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if open < 0 || end < open {
		return Info{}, errors.New("no name in parentheses")
	}
	const state, ppid, starttime = 0, 1, 19 // fields 3, 4 and 22 of proc_pid_stat(5)
	f := strings.Fields(s[end+1:])
	if len(f) <= starttime {
		return Info{}, fmt.Errorf("%d fields after the name, want at least %d", len(f), starttime+1)
	}
	info := Info{Comm: s[open+1 : end], State: f[state][0]}
	var err error
	if info.PPID, err = strconv.Atoi(f[ppid]); err != nil {
		return Info{}, fmt.Errorf("parent: %w", err)
	}
	if info.StartTime, err = strconv.ParseUint(f[starttime], 10, 64); err != nil {
		return Info{}, fmt.Errorf("start time: %w", err)
	}
	return info, nil
}

// effectiveUID reads the file status. The owner of /proc/PID is root for every process not
// dumpable.
func effectiveUID(pid int) (uint32, error) {
	data, err := readProc(pid, "status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		ids, ok := strings.CutPrefix(line, "Uid:")
		if !ok {
			continue
		}
		// Real, effective, saved, file system.
		if f := strings.Fields(ids); len(f) == 4 {
			uid, err := strconv.ParseUint(f[1], 10, 32)
			return uint32(uid), err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status: no Uid line", pid)
}

func readProc(pid int, name string) ([]byte, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	// ESRCH: the process exited between open and read.
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	return data, err
}

// Parent returns the process id of a process's parent, or 0 if it is outside this pid namespace.
// The error wraps [ErrGone] if there is no such process.
func Parent(pid int) (int, error) {
	info, err := readStat(pid)
	return info.PPID, err
}
