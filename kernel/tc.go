// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TCIngress is a filter of a device's incoming packets, before routing. It works
// on every kernel that weir supports, but belongs to the device and not to a link:
// it stays when nothing is pinned any more, until it is taken away or the device
// goes. Its methods run in the network namespace of the device.
type TCIngress struct {
	Ifindex int
	Name    string // of the filter, by which it is found again
}

// tcPriority comes before what others may have there; a program that is to leave
// packets to them returns TC_ACT_UNSPEC.
const tcPriority = 1

// tcHandle tells the filter from others of the same priority.
const tcHandle = 0x7765

func (t TCIngress) String() string { return fmt.Sprintf("tc ingress of device %d", t.Ifindex) }

// Attached says whether the device has the filter.
func (t TCIngress) Attached() (bool, error) {
	f, err := t.find()
	return f != nil, err
}

func (t TCIngress) find() (*netlink.BpfFilter, error) {
	all, err := netlink.FilterList(t.device(), netlink.HANDLE_MIN_INGRESS)
	if err != nil && !gone(err) && !errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("%s: listing filters: %w", t, err)
	}
	for _, f := range all {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == t.Name {
			return b, nil
		}
	}
	return nil, nil //nolint:nilnil // neither a filter nor an error
}

func (t TCIngress) device() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: t.Ifindex}}
}

// HasQdisc says whether the device has a qdisc that filters can be added to.
func (t TCIngress) HasQdisc() (bool, error) {
	all, err := netlink.QdiscList(t.device())
	if err != nil && !gone(err) {
		return false, fmt.Errorf("%s: listing qdiscs: %w", t, err)
	}
	return slices.ContainsFunc(all, func(q netlink.Qdisc) bool { return q.Type() == "clsact" || q.Type() == "ingress" }), nil
}

// Attach has the filter run prog from the next packet on. Where the device has no
// qdisc for it, it gets one, which [TCIngress.Detach] may take away again.
func (t TCIngress) Attach(prog *ebpf.Program) error {
	if err := netlink.QdiscAdd(t.qdisc()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s: adding the qdisc clsact: %w (Debian has it as module sch_ingress)", t, err)
	}
	Step("tc:qdisc")
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: t.Ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: tcHandle,
			Protocol: unix.ETH_P_ALL, Priority: tcPriority},
		Fd: prog.FD(), Name: t.Name, DirectAction: true})
	if err != nil {
		return fmt.Errorf("%s: adding a filter of priority %d: %w (module cls_bpf; tc filter show dev … ingress lists those of others)", t, tcPriority, err)
	}
	Step("tc:filter")
	return nil
}

// Detach takes the filter away, and with qdisc the qdisc too, unless others use
// it. A device or filter that is gone is no error.
func (t TCIngress) Detach(qdisc bool) error {
	f, err := t.find()
	if err != nil {
		return err
	}
	if f != nil {
		if err := netlink.FilterDel(f); err != nil && !gone(err) {
			return fmt.Errorf("%s: removing the filter: %w", t, err)
		}
		Step("tc:detached")
	}
	if there, err := t.HasQdisc(); err != nil || !there || !qdisc {
		return err
	}
	for _, side := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if others, err := netlink.FilterList(t.device(), side); err != nil || len(others) > 0 {
			return nil //nolint:nilerr // the device is gone, and its qdisc
		}
	}
	if err := netlink.QdiscDel(t.qdisc()); err != nil && !gone(err) {
		return fmt.Errorf("%s: removing the qdisc: %w", t, err)
	}
	Step("tc:qdisc removed")
	return nil
}

func (t TCIngress) qdisc() netlink.Qdisc {
	return &netlink.GenericQdisc{QdiscType: "clsact",
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: t.Ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// gone says that a device, or what was on it, is there no more.
func gone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT)
}
