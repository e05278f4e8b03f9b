// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/progowner"
	"github.com/weir-project/weir/internal/sockfilter"
)

// ErrOccupied is returned if a foreign program occupies a hook for one program. weir never replaces a foreign program.
var ErrOccupied = sockfilter.ErrOccupied

// TCX is the tcx hook of a device, with a link (Linux 6.6). It sees incoming packets before routing, or outgoing
// packets. Programs run one after the other, in the order of their attachment or of Order, as long as each returns
// TCX_NEXT (-1). Attach runs in the network namespace of the device.
type TCX struct {
	Ifindex int
	Device  string // name for messages
	Egress  bool
	Order   hookorder.Order // position among the programs at the hook
}

// TCXLink is the need of [TCX].
var TCXLink = Need{Name: "tcx links", Since: "6.6", Optional: true,
	For:    "filters of a device's packets with links; without them weir uses tc filters (clsact)",
	Remedy: "use a newer kernel", Probe: probeTCX}

func (a TCX) String() string { return a.Kind() + " of " + a.Device }

// Kind names the hook without the device.
func (a TCX) Kind() string {
	if a.Egress {
		return "tcx egress"
	}
	return "tcx ingress"
}

func (a TCX) hook() ebpf.AttachType {
	if a.Egress {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

// Attach implements Attachment. Foreign programs at the same hook stay.
func (a TCX) Attach(prog *ebpf.Program) (Link, error) {
	l, err := a.attach(prog)
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", a, err)
	}
	return l, nil
}

// Verify implements Attachment. The kernel reports device 0 after the removal of the device.
func (a TCX) Verify(l Link) error {
	info, err := l.Info()
	if err != nil {
		return err
	}
	if x := info.TCX(); x == nil || int(x.Ifindex) != a.Ifindex || ebpf.AttachType(x.AttachType) != a.hook() {
		return fmt.Errorf("%s: %w", a, ErrDetached)
	}
	return nil
}

// Around names the programs at the hook before and after the link's own. A program after it runs only if its verdict
// allows.
func (a TCX) Around(l Link) (before, behind []string, err error) {
	info, err := l.Info()
	if err != nil {
		return nil, nil, err
	}
	all, err := link.QueryPrograms(link.QueryOptions{Target: a.Ifindex, Attach: a.hook()})
	if err != nil {
		return nil, nil, fmt.Errorf("list programs at %s: %w", a, err)
	}
	at := slices.IndexFunc(all.Programs, func(p link.AttachedProgram) bool { id, ok := p.LinkID(); return ok && id == info.ID })
	if at < 0 {
		return nil, nil, fmt.Errorf("%s: %w", a, ErrDetached)
	}
	for i, p := range all.Programs {
		name := fmt.Sprintf("%d %q", p.ID, programName(uint32(p.ID)))
		if i < at {
			before = append(before, name)
		} else if i > at {
			behind = append(behind, name)
		}
	}
	return before, behind, nil
}

// query selects the programs at the hook.
func (a TCX) query() link.QueryOptions {
	return link.QueryOptions{Target: a.Ifindex, Attach: a.hook()}
}

// Anchored checks whether the hook allows the order. If the anchor is missing, the error wraps [hookorder.ErrNoAnchor]
// and lists the other programs at the hook, without the caller's own. The caller is in the device's namespace.
func (a TCX) Anchored(own uint32) error {
	if a.Order.Anchor == "" {
		return nil
	}
	all, _, err := hookorder.List(a.query(), own)
	if err != nil {
		return fmt.Errorf("list programs at %s: %w", a, err)
	}
	_, err = a.Order.Among(all, a)
	return err
}

// attach attaches a program at the position of Order. A concurrent change of the hook's programs changes the hook's
// revision: attach then retries.
func (a TCX) attach(prog *ebpf.Program) (l Link, err error) {
	o := link.TCXOptions{Interface: a.Ifindex, Program: prog, Attach: a.hook()}
	for range 20 {
		var all []hookorder.Program
		if a.Order.Anchor != "" {
			if all, o.ExpectedRevision, err = hookorder.List(a.query(), 0); err != nil {
				return nil, err
			}
		}
		if o.Anchor, err = a.Order.Among(all, a); err != nil {
			return nil, err
		}
		l, err = link.AttachTCX(o)
		if !errors.Is(err, unix.ESTALE) && !(o.ExpectedRevision != 0 && errors.Is(err, unix.ENOENT)) {
			break
		}
	}
	return l, err
}

// PositionAt reads the position of a link's program at its hook. It supports tcx, sk_lookup of a namespace, a cgroup,
// and XDP with its single program. ok is false for other hooks. The caller is in the namespace of the hook.
func PositionAt(at Attachment, l Link) (p hookorder.Position, ok bool, err error) {
	var q link.QueryOptions
	switch at := at.(type) {
	case TCX:
		q = at.query()
	case NetnsLookup:
		q = link.QueryOptions{Target: at.FD, Attach: ebpf.AttachSkLookup}
	case Cgroup:
		fd, err := unix.Open(at.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return p, false, fmt.Errorf("cgroup %s: %w", at.Path, err)
		}
		defer unix.Close(fd)
		q = link.QueryOptions{Target: fd, Attach: at.Hook}
	case XDP:
		return hookorder.Position{Hook: at.String(), Number: 1, Of: 1}, true, nil
	default:
		return p, false, nil
	}
	own, err := LinkProgram(l)
	if err != nil {
		return p, false, err
	}
	p, attached, err := hookorder.ReadPosition(own, q, at)
	if err == nil && !attached {
		err = fmt.Errorf("%s: %w", at, ErrDetached)
	}
	return p, err == nil, err
}

// probeTCX attaches to an impossible device number. A kernel with tcx reports ENODEV. Older kernels report another
// error.
func probeTCX() error {
	LiftMemlock()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return ExplainProbe(err)
	}
	defer p.Close()
	l, err := link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: p, Attach: ebpf.AttachTCXIngress})
	switch {
	case err == nil:
		l.Close()
		return nil
	case errors.Is(err, unix.ENODEV):
		return nil
	}
	return ExplainProbe(err)
}

// XDP is the hook of a device's incoming packets before the allocation of socket buffers (links since Linux 5.9). A
// device has room for one program. Attach runs in its network namespace, and returns [ErrOccupied] if another program is
// attached.
type XDP struct {
	Ifindex int
	Device  string // name for messages
	// Generic runs the program in the kernel on socket buffers, not in the driver. It is slower, for drivers without
	// XDP.
	Generic bool
}

// XDPProgram is the need of [XDP].
var XDPProgram = Need{Name: "XDP programs", Since: "4.8", Optional: true,
	For: "hook: xdp and xdp-generic", Remedy: "use hook: tcx", Probe: ProbeProgram(ebpf.XDP)}

func (a XDP) String() string { return a.Kind() + " of " + a.Device }

// Kind names the hook without the device.
func (a XDP) Kind() string {
	if a.Generic {
		return "generic XDP"
	}
	return "XDP"
}

// Attach implements Attachment.
func (a XDP) Attach(prog *ebpf.Program) (Link, error) {
	flags := link.XDPDriverMode
	if a.Generic {
		flags = link.XDPGenericMode
	}
	l, err := patiently(func() (Link, error) {
		return link.AttachXDP(link.XDPOptions{Interface: a.Ifindex, Program: prog, Flags: flags})
	})
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST):
		_, occupant := a.Occupant()
		return nil, fmt.Errorf("attach to %s: %w: %s; XDP has room for one program: use hook: tcx for a filter, leave interfaces out of a guard, or stop that program's owner (if it is a leftover: ip link set dev %s xdp off, xdp-loader unload %[4]s --all; bpftool net list shows all)",
			a, ErrOccupied, occupant, a.Device)
	case errors.Is(err, unix.EOPNOTSUPP) && !a.Generic:
		return nil, fmt.Errorf("attach to %s: %w: its driver has no XDP: use hook: xdp-generic or tcx", a, ErrUnsupported)
	}
	return nil, fmt.Errorf("attach to %s: %w (a driver may refuse XDP with a large MTU or with LRO: hook: xdp-generic or tcx works there)", a, err)
}

// patiently retries an attachment to an occupied hook for 500 ms. The kernel releases unpinned links, and links of a
// killed process, asynchronously.
func patiently(attach func() (Link, error)) (l Link, err error) {
	for range 50 {
		l, err = attach()
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EEXIST) {
			return l, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return l, err
}

// Occupant returns the ID of the device's XDP program and describes it. The ID is 0 if there is no program or it is
// unreadable. The caller is in the device's network namespace.
func (a XDP) Occupant() (program uint32, about string) {
	l, err := netlink.LinkByIndex(a.Ifindex)
	if err != nil || l.Attrs().Xdp == nil || !l.Attrs().Xdp.Attached {
		return 0, "a program already removed"
	}
	x := l.Attrs().Xdp
	mode := map[uint32]string{xdpAttachedDriver: "native", xdpAttachedGeneric: "generic", xdpAttachedHardware: "offloaded"}[x.AttachMode]
	return x.ProgId, fmt.Sprintf("%s, %s mode", progowner.Describe(x.ProgId, a.Ifindex), mode)
}

// xdpAt returns the ID of a device's XDP program, or 0.
func xdpAt(index int) uint32 {
	l, err := netlink.LinkByIndex(index)
	if err != nil || l.Attrs().Xdp == nil || !l.Attrs().Xdp.Attached {
		return 0
	}
	return l.Attrs().Xdp.ProgId
}

// XDP_ATTACHED_ of linux/if_link.h.
const (
	xdpAttachedDriver   = 1
	xdpAttachedGeneric  = 2
	xdpAttachedHardware = 3
)

// programName returns the name of a program, or "" if it is unreadable.
func programName(id uint32) string {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// Verify implements Attachment. The kernel reports device 0 after the removal of the device.
func (a XDP) Verify(l Link) error {
	info, err := l.Info()
	if err != nil {
		return err
	}
	if x := info.XDP(); x == nil || int(x.Ifindex) != a.Ifindex {
		return fmt.Errorf("%s: %w", a, ErrDetached)
	}
	return nil
}

// ProgramUses reports whether a program uses the map with ID m. The maps of an attached program identify its form of an
// instance.
func ProgramUses(program uint32, m ebpf.MapID) (bool, error) {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(program))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("program %d: %w", program, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("program %d: %w", program, err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		if id == m {
			return true, nil
		}
	}
	return false, nil
}
