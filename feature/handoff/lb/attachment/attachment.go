// SPDX-License-Identifier: Apache-2.0

// Package attachment names the attachments of a load balancer's programs: tcx links at its devices,
// or clsact filters on kernels without tcx (before 6.6). Functions with device names work in the
// network namespace of the calling thread.
package attachment

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/kernel"
)

// Link returns the pin name of the link at an interface.
func Link(ifindex int, egress bool) string {
	if egress {
		return fmt.Sprint("out", ifindex)
	}
	return fmt.Sprint("in", ifindex)
}

// Program returns the program of a link. buffer is the index of the buffer device.
func Program(link string, buffer int) string {
	switch link {
	case Link(buffer, false):
		return "lb_again"
	case Link(buffer, true):
		return "lb_own"
	}
	return "lb_in"
}

// Filter returns the filter that holds a program on kernels without tcx. It stays with the device.
// The next agent replaces its program.
func Filter(ifindex int, egress bool) kernel.Clsact {
	name := "weir_lb_in"
	if egress {
		name = "weir_lb_out"
	}
	return kernel.Clsact{Ifindex: ifindex, Name: name, Egress: egress}
}

// Filters returns the filters of a load balancer without links: at its existing devices and the
// buffer device.
func Filters(devices []string, buffer int) []kernel.Clsact {
	out := []kernel.Clsact{Filter(buffer, false), Filter(buffer, true)}
	for _, name := range devices {
		if i, err := net.InterfaceByName(name); err == nil { // otherwise the device is gone, and its filter with it
			out = append(out, Filter(i.Index, false))
		}
	}
	return out
}

// Detach removes the filters from devices. The load balancer's own devices take their filters with
// them.
func Detach(devices []string) error {
	var errs []error
	for _, name := range devices {
		if i, err := net.InterfaceByName(name); err == nil { // otherwise the device is gone, and its filter with it
			errs = append(errs, Filter(i.Index, false).Detach(true))
		}
	}
	return errors.Join(errs...)
}

// Runs reports whether lb_in is attached to an interface. links are the names of the pinned links.
func Runs(ifindex int, links []string) bool {
	if len(links) > 0 {
		return slices.Contains(links, Link(ifindex, false))
	}
	program, err := Filter(ifindex, false).Program()
	return err != nil || program != 0
}

// Running returns the id of a running program. All of them use the same maps. filters are the
// attachments if there are no links.
func Running(pins *kernel.Opened, links []string, filters []kernel.Clsact) (uint32, error) {
	if len(links) == 0 {
		return filters[0].Program()
	}
	ln, err := pins.Link(links[0])
	if err != nil {
		return 0, err
	}
	defer ln.Close()
	return kernel.LinkProgram(ln)
}

// Move replaces a link's program.
func Move(pins *kernel.Opened, link string, to *ebpf.Program) error {
	ln, err := pins.Link(link)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := kernel.MoveLink(ln, to); err != nil {
		return fmt.Errorf("move link %s to the new program: %w", link, err)
	}
	return nil
}
