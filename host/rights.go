// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// rights are the capabilities needed by every weir serve with pins. Features add their own ([feature.Privileged]).
// TestEachRight leaves each of them out. CAP_SYS_ADMIN includes CAP_BPF, CAP_PERFMON and CAP_CHECKPOINT_RESTORE.
var rights = []feature.Right{
	{Capability: unix.CAP_SYS_ADMIN, For: "load programs and create maps (kernel.Load), open objects by number (kernel.restoreMaps), enter network namespaces (netns.Do)"},
	{Capability: unix.CAP_NET_ADMIN, For: "attach programs (kernel/hook), close and list sockets (internal/sockdiag), devices and routes, SO_MARK, TCP_REPAIR"},
	{Capability: unix.CAP_NET_BIND_SERVICE, For: "listen at ports below 1024 (host.metricsPort, handoff/peer)"},
	{Capability: unix.CAP_SYS_PTRACE, For: "read namespaces, copy sockets of other users' processes (netns.openIfInode, pidfd.Dup)"},
	{Capability: unix.CAP_DAC_READ_SEARCH, For: "read the configuration and its files, enter /sys/fs/bpf (mode 700), list /proc/PID/fd"},
}

// serveRights returns the capabilities of a weir serve with these features, or with all if only is empty.
func serveRights(only []string) (set uint64) {
	keep := func(all []feature.Right) {
		for _, r := range all {
			set |= 1 << r.Capability
		}
	}
	if !slices.Equal(only, []string{"keeper"}) { // it can run from its file alone, without pins (unpinned)
		keep(rights)
	}
	for _, p := range featuresOnly(only) {
		if f, ok := p.Value.(feature.Privileged); ok {
			keep(f.Rights())
		}
	}
	return set
}

// rightsOfRoot are kept by root, for pins and records of another user (kernel.Prepare). That user needs none of them: the
// files are its own, and a process in the group of readers may give them to it.
const rightsOfRoot = 1<<unix.CAP_FOWNER | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_CHOWN

// DropRights removes the capabilities unused by a weir serve with these features, or with all if only is empty. It
// affects this process and its children.
func DropRights(only []string) error {
	keep := serveRights(only)
	if os.Geteuid() == 0 {
		keep |= rightsOfRoot
		for _, r := range rights { // root's keeper uses the pins, too
			keep |= 1 << r.Capability
		}
	}
	return users.KeepOnly(keep)
}
