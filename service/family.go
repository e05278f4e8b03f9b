// SPDX-License-Identifier: Apache-2.0

package service

import (
	"os"
	"strconv"
	"time"

	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

// family knows a process and all that descend from it by a UTS namespace of their own. A
// process group does not: setsid(2) leaves it, and the daemon that results would stay in
// weir serve's cgroup, with nobody to end it. A daemon leaves this namespace only on purpose: by one of a user
// namespace of its own.
type family struct {
	ns *os.File // keeps the number from another namespace; nil: none could be made
}

// newFamily moves the calling thread to a new UTS namespace, which its children have. The
// thread must be thrown away. The names of the host stay as they are.
func newFamily() family {
	if unix.Unshare(unix.CLONE_NEWUTS) != nil {
		return family{} // without CAP_SYS_ADMIN, or in a kernel without such namespaces
	}
	f, err := os.Open("/proc/thread-self/ns/uts")
	if err != nil {
		return family{}
	}
	return family{f}
}

// maxSweeps bounds the looks for processes that are started while others are ended, and sweepEvery is between two.
const (
	maxSweeps  = 100
	sweepEvery = 5 * time.Millisecond
)

// end ends the whole family.
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

// sweep ends the members of the family that it finds, and says whether there were any.
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

// inNamespace says whether a process has a UTS namespace. A zombie has none.
func inNamespace(pid int, ns unix.Stat_t) bool {
	st, err := pidfd.Ask(pid, func() (st unix.Stat_t, err error) {
		err = unix.Stat("/proc/"+strconv.Itoa(pid)+"/ns/uts", &st)
		return st, err
	}, nil)
	return err == nil && st.Dev == ns.Dev && st.Ino == ns.Ino
}
