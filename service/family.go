// SPDX-License-Identifier: Apache-2.0

package service

import (
	"os"
	"strconv"
	"time"

	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

// family identifies a process and its descendants by a UTS namespace of their own. A process group does not: after
// setsid(2) a daemon leaves it, and would stay in weir serve's cgroup for ever. A process leaves this namespace only on
// purpose, through a user namespace of its own.
type family struct {
	ns *os.File // keeps its inode number from reuse; nil: no namespace could be made
}

// newFamily moves the calling thread to a new UTS namespace, inherited by its children. The thread must be discarded.
// The host's names stay unchanged.
func newFamily() family {
	if unix.Unshare(unix.CLONE_NEWUTS) != nil {
		return family{} // no CAP_SYS_ADMIN, or no UTS namespaces in this kernel
	}
	f, err := os.Open("/proc/thread-self/ns/uts")
	if err != nil {
		return family{}
	}
	return family{f}
}

// maxSweeps bounds the sweeps, because processes may start others meanwhile. sweepEvery is the time between two sweeps.
const (
	maxSweeps  = 100
	sweepEvery = 5 * time.Millisecond
)

// end kills the whole family.
func (f family) end() {
	if f.ns == nil {
		return
	}
	defer f.ns.Close()
	for range maxSweeps {
		if !f.sweep() {
			return
		}
		time.Sleep(sweepEvery)
	}
}

// sweep kills the members of the family found now, and reports whether there were any.
func (f family) sweep() (found bool) {
	var own unix.Stat_t
	if unix.Fstat(int(f.ns.Fd()), &own) != nil {
		return false
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return false
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return false
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() || !inNamespace(pid, own) {
			continue
		}
		p, err := pidfd.Open(pid)
		if err != nil {
			continue
		}
		if inNamespace(pid, own) { // still the same process
			found = unix.PidfdSendSignal(p.FD(), unix.SIGKILL, nil, 0) == nil || found
		}
		p.Close()
	}
	return found
}

// inNamespace reports whether a process is in a UTS namespace. A zombie is in none.
func inNamespace(pid int, ns unix.Stat_t) bool {
	st, err := pidfd.Ask(pid, func() (st unix.Stat_t, err error) {
		err = unix.Stat("/proc/"+strconv.Itoa(pid)+"/ns/uts", &st)
		return st, err
	}, nil)
	return err == nil && st.Dev == ns.Dev && st.Ino == ns.Ino
}
