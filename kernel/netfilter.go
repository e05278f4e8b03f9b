// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Netfilter is a netfilter hook of a network namespace, with a link (Linux 6.4). Attach runs in the namespace. A pinned
// link keeps the namespace alive, even without processes and a name.
//
// The kernel cannot replace the program of such a link: attach a [Dispatcher] to change the program.
type Netfilter struct {
	Family   uint8 // unix.NFPROTO_IPV4 or unix.NFPROTO_IPV6
	Hook     InetHook
	Priority int32 // order at the hook, nftables chains included; the lowest runs first
}

// InetHook is a netfilter hook of the IP stack. The values are from enum nf_inet_hooks in linux/netfilter.h.
type InetHook uint32

// Hook points.
const (
	Prerouting  InetHook = unix.NF_INET_PRE_ROUTING
	Input       InetHook = unix.NF_INET_LOCAL_IN
	Forward     InetHook = unix.NF_INET_FORWARD
	Output      InetHook = unix.NF_INET_LOCAL_OUT
	Postrouting InetHook = unix.NF_INET_POST_ROUTING
)

var inetHooks = map[InetHook]string{Prerouting: "prerouting", Input: "input", Forward: "forward", Output: "output", Postrouting: "postrouting"}

func (h InetHook) String() string { return inetHooks[h] }

// NetfilterLink is the need of [Netfilter].
var NetfilterLink = Need{Name: "netfilter links", Since: "6.4", Optional: true,
	For: "hook: netfilter", Remedy: "use hook: nft or tcx; or a kernel built with CONFIG_NETFILTER_BPF_LINK",
	Probe: ProbeProgram(ebpf.Netfilter)}

func (a Netfilter) String() string {
	family := "IPv4"
	if a.Family == unix.NFPROTO_IPV6 {
		family = "IPv6"
	}
	return fmt.Sprintf("netfilter %s of %s, priority %d", a.Hook, family, a.Priority)
}

// Attach implements Attachment. A hook has room for one BPF program of a priority.
func (a Netfilter) Attach(prog *ebpf.Program) (Link, error) {
	l, err := patiently(func() (Link, error) {
		return link.AttachNetfilter(link.NetfilterOptions{Program: prog, ProtocolFamily: link.NetfilterProtocolFamily(a.Family),
			Hook: link.NetfilterInetHook(a.Hook), Priority: a.Priority})
	})
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("attach to %s: %w: a hook point has room for one BPF program of a priority: choose another priority", a, ErrOccupied)
	case errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("attach to %s: %w: run as root; the lowest and the highest priority there is are the kernel's own", a, err)
	case errors.Is(err, unix.EAFNOSUPPORT):
		return nil, fmt.Errorf("attach to %s: %w: the kernel has no netfilter for that family", a, ErrUnsupported)
	case err != nil:
		return nil, fmt.Errorf("attach to %s: %w", a, err)
	}
	return l, nil
}

// Verify implements Attachment.
func (a Netfilter) Verify(l Link) error {
	info, err := l.Info()
	if err != nil {
		return err
	}
	x := info.Netfilter()
	if x == nil || uint8(x.ProtocolFamily) != a.Family || InetHook(x.Hook) != a.Hook || x.Priority != a.Priority {
		return fmt.Errorf("%s: %w", a, ErrDetached)
	}
	return nil
}

// NetfilterSeen caches the attached hooks of one network namespace and one family. A link does not report its namespace.
// Here therefore probes each hook used by any link: attaching a passing program fails if the hook is occupied here,
// because net/netfilter/core.c allows one BPF program of a priority. The result is valid while the host has the same
// links. A link never moves to another hook.
type NetfilterSeen struct {
	links []link.ID
	here  []Netfilter
	since time.Time
}

// netfilterFor is the maximum age of the result. A detached link held open by a process is still listed.
const netfilterFor = time.Minute

// Here returns the hooks of a family with linked programs in the caller's network namespace, sorted by hook and
// priority.
func (s *NetfilterSeen) Here(family uint8) ([]Netfilter, error) {
	links, anywhere, err := netfilterLinks(family)
	if err != nil {
		return nil, err
	}
	if slices.Equal(links, s.links) && time.Since(s.since) < netfilterFor {
		return s.here, nil
	}
	here, err := netfilterOccupied(anywhere)
	if err != nil {
		return nil, err
	}
	*s = NetfilterSeen{links, here, time.Now()}
	return here, nil
}

// netfilterLinks returns the IDs and hooks of the host's links of a family.
func netfilterLinks(family uint8) (links []link.ID, at []Netfilter, err error) {
	it := new(link.Iterator)
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			continue // it ended meanwhile
		}
		if x := info.Netfilter(); x != nil && uint8(x.ProtocolFamily) == family {
			links = append(links, info.ID)
			at = append(at, Netfilter{Family: family, Hook: InetHook(x.Hook), Priority: x.Priority})
		}
	}
	if err := it.Err(); err != nil {
		return nil, nil, fmt.Errorf("list links: %w", err)
	}
	slices.SortFunc(at, func(a, b Netfilter) int {
		return cmp.Or(cmp.Compare(a.Hook, b.Hook), cmp.Compare(a.Priority, b.Priority))
	})
	return links, slices.Compact(at), nil
}

// netfilterOccupied returns the given hooks with a program in the caller's namespace. Tests count its calls.
var netfilterOccupied = func(places []Netfilter) (here []Netfilter, err error) {
	if len(places) == 0 {
		return nil, nil
	}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, nfAccept), asm.Return()}})
	if err != nil {
		return nil, explainLoad("load a passing program", err)
	}
	defer pass.Close()
	for _, a := range places {
		l, err := link.AttachNetfilter(link.NetfilterOptions{Program: pass, ProtocolFamily: link.NetfilterProtocolFamily(a.Family),
			Hook: link.NetfilterInetHook(a.Hook), Priority: a.Priority})
		switch {
		case errors.Is(err, unix.EBUSY):
			here = append(here, a)
		case err != nil:
			return nil, fmt.Errorf("probe for a program at %s: %w", a, err)
		default:
			l.Close()
		}
	}
	return here, nil
}

// nfAccept is NF_ACCEPT of linux/netfilter.h.
const nfAccept = 1

// Dispatcher is a program that only tail-calls another program. It makes programs replaceable at hooks where the kernel
// cannot replace one. One map update changes the program: a packet meets the old program or the new one. Without a
// program it passes packets.
type Dispatcher struct {
	Slot *ebpf.Map // holds the program at key 0; keep it pinned or open, because the kernel empties it otherwise
}

// NewDispatcherSlot creates the map of a dispatcher.
func NewDispatcherSlot(name string) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: name, Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, explainLoad("create the slot of a dispatcher", err)
	}
	return m, nil
}

// Load loads the dispatcher for netfilter programs.
func (d Dispatcher) Load(name string) (*ebpf.Program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMapPtr(asm.R2, d.Slot.FD()),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnTailCall.Call(), // returns only if the slot is empty
			asm.Mov.Imm(asm.R0, nfAccept),
			asm.Return(),
		}})
	if err != nil {
		return nil, explainLoad("load the netfilter dispatcher", err)
	}
	return p, nil
}

// Set makes prog run from the next packet on.
func (d Dispatcher) Set(prog *ebpf.Program) error {
	if err := d.Slot.Put(uint32(0), prog); err != nil {
		return fmt.Errorf("set the program of a dispatcher: %w", err)
	}
	return nil
}

// Program returns the ID of the current program, or 0.
func (d Dispatcher) Program() (uint32, error) {
	var id uint32
	err := d.Slot.Lookup(uint32(0), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, fmt.Errorf("read the program of a dispatcher: %w", err)
	}
	return id, nil
}
