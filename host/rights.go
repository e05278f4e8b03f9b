// SPDX-License-Identifier: Apache-2.0

package host

import (
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// rights are the capabilities that weir serve uses. examples/weir-serve.service bounds it to the same ones.
var rights = []struct {
	bit uint
	by  string // the features, and what they do with it
}{
	{unix.CAP_BPF, "all: load programs, make maps"},
	{unix.CAP_PERFMON, "all: programs with pointers, tracepoints"},
	{unix.CAP_SYS_ADMIN, "all: enter network namespaces, open objects by number, mount bpffs; BPF before Linux 5.8"},
	{unix.CAP_SYS_CHROOT, "all: enter the mount namespace of a network namespace's name"},
	{unix.CAP_SYS_RESOURCE, "all: locked memory of maps before Linux 5.11, more descriptors"},
	{unix.CAP_NET_ADMIN, "all: attach; sock_diag; guard, filter, reroute: interfaces; handoff: SO_MARK, TCP_REPAIR, buffers"},
	{unix.CAP_NET_RAW, "steer: hear and replay templates; reroute: probes; handoff: packets that wait"},
	{unix.CAP_NET_BIND_SERVICE, "steer: sockets below port 1024 that hold a group; register, metrics"},
	{unix.CAP_SYS_PTRACE, "steer: duplicate members' sockets (pidfd_getfd), read whose they are"},
	{unix.CAP_DAC_READ_SEARCH, "steer: pid files and lists of other users"},
	{unix.CAP_DAC_OVERRIDE, "reroute: FRR's sockets; sockets in directories of others"},
	{unix.CAP_CHOWN, "serve: the group of its socket"},
	{unix.CAP_FOWNER, "serve: the mode of its socket"},
	{unix.CAP_SETUID, "steer: ready.command as the member's user"},
	{unix.CAP_SETGID, "steer: the same, its groups"},
	{unix.CAP_SETPCAP, "steer: the same, without the capabilities that the member lacks"},
	{unix.CAP_KILL, "steer: end a ready.command, signal the holder of a group"},
	{unix.CAP_SYS_NICE, "handoff, reroute: priority while sessions move and probes are due"},
	{unix.CAP_IPC_LOCK, "all: locked memory of maps before Linux 5.11"},
	{unix.CAP_CHECKPOINT_RESTORE, "all: what CAP_SYS_ADMIN did of /proc before Linux 5.9"},
}

// DropRights takes from this process, and from what it starts, the capabilities that weir serve does not use.
func DropRights() error {
	var keep uint64
	for _, r := range rights {
		keep |= 1 << r.bit
	}
	return users.KeepOnly(keep)
}
