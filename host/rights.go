// SPDX-License-Identifier: Apache-2.0

package host

import (
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// rights are the capabilities needed by every weir serve. Features add their own (feature.Privileged).
// examples/weir-serve.service bounds the process to all of them.
var rights = []feature.Right{
	{Capability: unix.CAP_BPF, For: "load programs, make maps"},
	{Capability: unix.CAP_PERFMON, For: "programs with pointers, tracepoints"},
	{Capability: unix.CAP_SYS_ADMIN, For: "enter network namespaces, open objects by number, mount bpffs; BPF before Linux 5.8"},
	{Capability: unix.CAP_SYS_CHROOT, For: "enter the mount namespace of a network namespace's name"},
	{Capability: unix.CAP_SYS_RESOURCE, For: "locked memory of maps before Linux 5.11, more descriptors"},
	{Capability: unix.CAP_NET_ADMIN, For: "attach; sock_diag; interfaces; SO_MARK, TCP_REPAIR, buffers"},
	{Capability: unix.CAP_NET_BIND_SERVICE, For: "metrics below port 1024"},
	{Capability: unix.CAP_SYS_PTRACE, For: "read the namespaces of processes"},
	{Capability: unix.CAP_DAC_READ_SEARCH, For: "files of other users that the configuration names"},
	{Capability: unix.CAP_CHOWN, For: "the group of its socket"},
	{Capability: unix.CAP_FOWNER, For: "the mode of its socket"},
	{Capability: unix.CAP_IPC_LOCK, For: "locked memory of maps before Linux 5.11"},
	{Capability: unix.CAP_CHECKPOINT_RESTORE, For: "/proc, by CAP_SYS_ADMIN before Linux 5.9"},
}

// serveRights returns the capabilities of a weir serve with these features, or with all if only is empty.
func serveRights(only []string) (set uint64) {
	keep := func(all []feature.Right) {
		for _, r := range all {
			set |= 1 << r.Capability
		}
	}
	keep(rights)
	for _, p := range featuresOnly(only) {
		if f, ok := p.Value.(feature.Privileged); ok {
			keep(f.Rights())
		}
	}
	return set
}

// DropRights removes the capabilities unused by a weir serve with these features, or with all if only is empty. It
// affects this process and its children.
func DropRights(only []string) error { return users.KeepOnly(serveRights(only)) }
