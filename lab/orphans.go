// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// namespaceInodes returns the inode numbers of a run's named namespaces, by the form of /proc/PID/ns/net.
func namespaceInodes(id string) map[string]string {
	inodes := map[string]string{}
	names, _ := netns.Names()
	for _, n := range names {
		var st unix.Stat_t
		if strings.HasPrefix(n, prefix+id+"-") && unix.Stat("/run/netns/"+n, &st) == nil {
			inodes[fmt.Sprintf("net:[%d]", st.Ino)] = strconv.FormatUint(st.Ino, 10)
		}
	}
	return inodes
}

// pids lists all processes except this one.
func pids() []int {
	var all []int
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && pid != os.Getpid() {
			all = append(all, pid)
		}
	}
	return all
}

// ofRun finds the living processes of a run by two marks, because each can be missing. A daemon may
// overwrite its environment by setting its title. weir itself runs outside the namespaces.
func ofRun(id string, inodes map[string]string) []int {
	return slices.DeleteFunc(pids(), func(pid int) bool {
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)); err == nil && inodes[ns] != "" {
			return false
		}
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)) // empty for a zombie, like the link above
		return !slices.ContainsFunc(bytes.Split(env, []byte{0}), func(v []byte) bool { return string(v) == runMark(id) })
	})
}

func processCommand(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}

// endAll kills the processes of a run until none is left. It loops because a daemon may fork between
// listing and kill.
func endAll(id string, inodes map[string]string, limit time.Duration) {
	for deadline := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		found := ofRun(id, inodes)
		for _, pid := range found {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if len(found) == 0 || time.Now().After(deadline) {
			return
		}
	}
}

// reapOrphans waits for ended children without a Process, such as the plugins of a killed daemon.
func reapOrphans(started map[int]bool) {
	me := strconv.Itoa(os.Getpid())
	for _, pid := range pids() {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // state, parent, …
		if len(fields) < 2 || fields[0] != "Z" || fields[1] != me || started[pid] {
			continue
		}
		var status unix.WaitStatus
		_, _ = unix.Wait4(pid, &status, unix.WNOHANG, nil)
	}
}
