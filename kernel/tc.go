// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
)

// Clsact is a tc filter of a device's incoming packets before routing, or of its outgoing packets. It works on every
// supported kernel. It belongs to the device, not to a link: it survives the pins until it or the device is removed. Its
// methods run in the network namespace of the device. From Linux 6.6 on, [TCX] does the same with a link.
type Clsact struct {
	Ifindex int
	Name    string // identifies the filter
	Egress  bool
	// Priority orders filters, the lowest first. 0 means 1, before most other filters. A program returns TC_ACT_UNSPEC
	// to pass packets on to later filters.
	Priority uint16
}

// ClsactFilter is the need of [Clsact].
var ClsactFilter = Need{Name: "tc filters (clsact)", Since: "4.5", Optional: true,
	For:    "filters of a device's packets where the kernel has no tcx",
	Remedy: "the kernel must be built with CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS",
	Probe:  func() error { return ProbeProgram(ebpf.SchedCLS)() }}

const (
	tcPriority = 1
	// tcHandle is the handle of the first filter of priority 1 at a device.
	tcHandle = 0x7765
)

func (t Clsact) String() string {
	if t.Egress {
		return fmt.Sprintf("tc egress of device %d", t.Ifindex)
	}
	return fmt.Sprintf("tc ingress of device %d", t.Ifindex)
}

func (t Clsact) priority() uint16 {
	if t.Priority == 0 {
		return tcPriority
	}
	return t.Priority
}

func (t Clsact) side() uint32 {
	if t.Egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// Attached reports whether the device has the filter.
func (t Clsact) Attached() (bool, error) {
	f, err := t.find()
	return f != nil, err
}

// Program returns the ID of the filter's program, or 0 if the device has no such filter.
func (t Clsact) Program() (id uint32, err error) {
	f, err := t.find()
	if f == nil {
		return 0, err
	}
	return uint32(f.Id), nil
}

func (t Clsact) find() (*netlink.BpfFilter, error) {
	all, err := t.filters()
	for _, f := range all {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == t.Name {
			return b, err
		}
	}
	return nil, err
}

func (t Clsact) filters() ([]netlink.Filter, error) {
	all, err := dump.FilterList(t.device(), t.side())
	if err != nil && !gone(err) && !errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("%s: list filters: %w", t, err)
	}
	return all, nil
}

func (t Clsact) device() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: t.Ifindex}}
}

// HasQdisc reports whether the device has a qdisc for filters.
func (t Clsact) HasQdisc() (bool, error) {
	all, err := dump.QdiscList(t.device())
	if err != nil && !gone(err) {
		return false, fmt.Errorf("%s: list qdiscs: %w", t, err)
	}
	return slices.ContainsFunc(all, func(q netlink.Qdisc) bool {
		return q.Type() == "clsact" || q.Type() == "ingress" && !t.Egress
	}), nil
}

// Attach makes the filter run prog from the next packet on. It replaces the previous program: each packet meets one of
// the two. Attach adds a missing qdisc. [Clsact.Detach] may remove it.
func (t Clsact) Attach(prog *ebpf.Program) error {
	if err := netlink.QdiscAdd(t.qdisc()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s: add qdisc clsact: %w (module sch_ingress)", t, err)
	}
	Step("tc:qdisc")
	handle, err := t.handle()
	if err != nil {
		return err
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: t.Ifindex, Parent: t.side(), Handle: handle,
			Protocol: unix.ETH_P_ALL, Priority: t.priority()},
		Fd: prog.FD(), Name: t.Name, DirectAction: true})
	if err != nil {
		return fmt.Errorf("%s: add a filter of priority %d: %w (module cls_bpf; list other filters with tc filter show dev …)", t, t.priority(), err)
	}
	Step("tc:filter")
	return nil
}

// handle returns the filter's own handle, or a free one. Other filters of the same priority, also of other features,
// have their own.
func (t Clsact) handle() (uint32, error) {
	all, err := t.filters()
	if err != nil {
		return 0, err
	}
	taken := map[uint32]bool{}
	for _, f := range all {
		if a := f.Attrs(); a.Priority == t.priority() {
			if b, ok := f.(*netlink.BpfFilter); ok && b.Name == t.Name {
				return a.Handle, nil
			}
			taken[a.Handle] = true
		}
	}
	handle := uint32(tcHandle)
	if t.priority() != tcPriority {
		h := fnv.New32a()
		h.Write([]byte(t.Name))
		handle = h.Sum32()
	}
	for handle == 0 || taken[handle] {
		handle++
	}
	return handle, nil
}

// Detach removes the filter. With qdisc it also removes the qdisc, unless other filters use it. A missing device or
// filter is not an error.
func (t Clsact) Detach(qdisc bool) error {
	f, err := t.find()
	if err != nil {
		return err
	}
	if f != nil {
		if err := netlink.FilterDel(f); err != nil && !gone(err) {
			return fmt.Errorf("%s: remove the filter: %w", t, err)
		}
		Step("tc:detached")
	}
	if there, err := t.HasQdisc(); err != nil || !there || !qdisc {
		return err
	}
	for _, side := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if others, err := dump.FilterList(t.device(), side); err != nil || len(others) > 0 {
			return nil //nolint:nilerr // the device is gone, and its qdisc
		}
	}
	if err := netlink.QdiscDel(t.qdisc()); err != nil && !gone(err) {
		return fmt.Errorf("%s: remove the qdisc: %w", t, err)
	}
	Step("tc:qdisc removed")
	return nil
}

func (t Clsact) qdisc() netlink.Qdisc {
	return &netlink.GenericQdisc{QdiscType: "clsact",
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: t.Ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// gone reports whether the error means a missing device, filter or qdisc.
func gone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT)
}
