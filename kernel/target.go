// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"golang.org/x/sys/unix"
)

// targetKind is the kind of a link's hook.
type targetKind string

const (
	targetLookup    targetKind = "sk_lookup"
	targetTCX       targetKind = "tcx"
	targetXDP       targetKind = "xdp"
	targetCgroup    targetKind = "cgroup"
	targetNetfilter targetKind = "netfilter"
	targetOther     targetKind = "other" // tracepoints: attached while the link exists
)

// detachable reports whether the kernel reports a detached link by number 0.
func (k targetKind) detachable() bool { return k != targetNetfilter && k != targetOther }

// target is the hook of a link.
type target struct {
	Kind     targetKind `json:"kind"`
	Where    uint64     `json:"where,omitempty"` // inode number of a namespace, index of a device or ID of a cgroup; 0: detached
	Hook     uint32     `json:"hook,omitempty"`  // the attach type; netfilter: the hook
	Family   uint8      `json:"family,omitempty"`
	Priority int32      `json:"priority,omitempty"`
}

func newTarget(info *link.Info) target {
	if x := info.NetNs(); x != nil {
		return target{Kind: targetLookup, Where: uint64(x.NetnsInode), Hook: uint32(x.AttachType)}
	}
	if x := info.TCX(); x != nil {
		return target{Kind: targetTCX, Where: uint64(x.Ifindex), Hook: uint32(x.AttachType)}
	}
	if x := info.XDP(); x != nil {
		return target{Kind: targetXDP, Where: uint64(x.Ifindex)}
	}
	if x := info.Cgroup(); x != nil {
		return target{Kind: targetCgroup, Where: x.CgroupId, Hook: uint32(x.AttachType)}
	}
	if x := info.Netfilter(); x != nil {
		return target{Kind: targetNetfilter, Family: uint8(x.ProtocolFamily), Hook: uint32(x.Hook), Priority: x.Priority}
	}
	return target{Kind: targetOther}
}

// String names the target for people. The device name needs a call in the device's namespace.
func (t target) String() string {
	switch t.Kind {
	case targetLookup:
		return NetnsLookup{Inode: t.Where}.String()
	case targetTCX:
		return TCX{Device: deviceName(t.Where), Egress: ebpf.AttachType(t.Hook) == ebpf.AttachTCXEgress}.String()
	case targetXDP:
		return XDP{Device: deviceName(t.Where)}.String()
	case targetCgroup:
		return Cgroup{Path: "its root", Hook: ebpf.AttachType(t.Hook)}.String()
	case targetNetfilter:
		return t.netfilter().String()
	}
	return "its tracepoint"
}

func deviceName(index uint64) string {
	link, err := netlink.LinkByIndex(int(index)) // net.InterfaceByIndex would read all links
	if err != nil {
		return fmt.Sprintf("device %d", index)
	}
	return link.Attrs().Name
}

func (t target) netfilter() Netfilter {
	return Netfilter{Family: t.Family, Hook: InetHook(t.Hook), Priority: t.Priority}
}

// exists reports whether the namespace or device of the target still exists. The caller is in the namespace.
func (t target) exists(ns *netns.Handle) bool {
	switch t.Kind {
	case targetLookup:
		return ns != nil && ns.Inode() == t.Where
	case targetTCX, targetXDP:
		_, err := net.InterfaceByIndex(int(t.Where))
		return err == nil
	}
	return true
}

// nothingAt reports whether a netfilter hook of the caller's namespace is free, because a netfilter link does not report
// its detachment.
func nothingAt(a Netfilter) bool {
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, nfAccept), asm.Return()}})
	if err != nil {
		return false
	}
	defer pass.Close()
	l, err := link.AttachNetfilter(link.NetfilterOptions{Program: pass, ProtocolFamily: link.NetfilterProtocolFamily(a.Family),
		Hook: link.NetfilterInetHook(a.Hook), Priority: a.Priority})
	if err != nil {
		return false // EBUSY, as expected, or unknown
	}
	l.Close()
	return true
}

// ahead describes the foreign programs at a target, or at an earlier hook of its device. ours are the programs of this
// root. The caller is in the namespace.
func (t target) ahead(ns *netns.Handle, program uint32, ours map[uint32]bool) []string {
	var q link.QueryOptions
	switch t.Kind {
	case targetLookup:
		q = link.QueryOptions{Target: ns.FD(), Attach: ebpf.AttachSkLookup}
	case targetTCX:
		q = link.QueryOptions{Target: int(t.Where), Attach: ebpf.AttachType(t.Hook)}
	case targetCgroup:
		root, err := units.CgroupRoot()
		if err != nil {
			return nil
		}
		fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil
		}
		defer unix.Close(fd)
		q = link.QueryOptions{Target: fd, Attach: ebpf.AttachType(t.Hook)}
	default:
		return nil
	}
	all, err := link.QueryPrograms(q)
	if err != nil {
		all = &link.QueryResult{} // no tcx before Linux 6.6
	}
	var out []string
	before := true
	for _, p := range all.Programs {
		id := uint32(p.ID)
		if id == program {
			before = false
			continue
		}
		if ours[id] || !before && t.Kind == targetTCX {
			continue
		}
		name := programName(id)
		if harmless[name] {
			continue
		}
		out = append(out, t.describe(id, name, before))
	}
	if t.Kind == targetTCX && ebpf.AttachType(t.Hook) == ebpf.AttachTCXIngress {
		if x := xdpAt(int(t.Where)); x != 0 && !ours[x] {
			out = append(out, fmt.Sprintf("program %d %q runs at XDP of %s before weir's at %s: packets it drops or redirects never reach weir", x, programName(x), deviceName(t.Where), t))
		}
	}
	return out
}

// weirs are program names of a weir with another root. Programs in harmless do not interfere: weir serve holds them by
// links without pins, or they see only packets of their own namespace and ports.
var (
	weirs    = map[string]bool{"steer_lookup": true, "steer_dispatch": true}
	harmless = map[string]bool{"bfd_tick": true, "bfd_receive": true, "guard_cgroup": true, "bind_share4": true, "bind_share6": true}
)

func (t target) describe(id uint32, name string, before bool) string {
	where := "after"
	if before {
		where = "before"
	}
	whose := fmt.Sprintf("program %d %q", id, name)
	if weirs[name] {
		whose += ", of a weir with another --root,"
	}
	switch t.Kind {
	case targetLookup:
		return fmt.Sprintf("%s runs at %s too, %s weir's: the last program to choose a socket decides", whose, t, where)
	case targetCgroup:
		return fmt.Sprintf("%s runs at %s too, %s weir's: packets it rejects are lost despite weir", whose, t, where)
	}
	return fmt.Sprintf("%s runs at %s before weir's: packets it consumes, drops or redirects never reach weir", whose, t)
}
