// SPDX-License-Identifier: Apache-2.0

// Package attachment says where a load balancer's programs are: links at tcx of its devices, or filters of these where the kernel has no
// tcx (before 6.6). Functions that take devices work in the network namespace of the calling thread.
package attachment

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/kernel"
)

// Link is what the link at an interface is pinned as.
func Link(ifindex int, egress bool) string {
	if egress {
		return fmt.Sprint("out", ifindex)
	}
	return fmt.Sprint("in", ifindex)
}

// Program is the program of a link, by the interface of buffered packets.
func Program(link string, buffer int) string {
	switch link {
	case Link(buffer, false):
		return "lb_again"
	case Link(buffer, true):
		return "lb_own"
	}
	return "lb_in"
}

// Filter is a program's place where the kernel has no tcx: a filter of the device, which stays with it, and which the next life of the
// load balancer exchanges.
func Filter(ifindex int, egress bool) kernel.Clsact {
	name := "weir_lb_in"
	if egress {
		name = "weir_lb_out"
	}
	return kernel.Clsact{Ifindex: ifindex, Name: name, Egress: egress}
}

// Filters are those of a load balancer without links: at its devices, as far as these are there, and at that of buffered packets.
func Filters(devices []string, buffer int) []kernel.Clsact {
	out := []kernel.Clsact{Filter(buffer, false), Filter(buffer, true)}
	for _, name := range devices {
		if i, err := net.InterfaceByName(name); err == nil { // else it has gone, and its filter
			out = append(out, Filter(i.Index, false))
		}
	}
	return out
}

// Detach removes filters from devices. The load balancer's own devices take their filters with them.
func Detach(devices []string) error {
	var errs []error
	for _, name := range devices {
		if i, err := net.InterfaceByName(name); err == nil { // else it has gone, and its filter
			errs = append(errs, Filter(i.Index, false).Detach(true))
		}
	}
	return errors.Join(errs...)
}

// Runs reports whether the program for packets from outside is attached at an interface. links are those that are pinned.
func Runs(ifindex int, links []string) bool {
	if len(links) > 0 {
		return slices.Contains(links, Link(ifindex, false))
	}
	program, err := Filter(ifindex, false).Program()
	return err != nil || program != 0
}

// Running is the id of a program that runs: all use the same maps. filters are the places of programs where there are no links.
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

// Move puts a program in place of a link's.
func Move(pins *kernel.Opened, link string, to *ebpf.Program) error {
	ln, err := pins.Link(link)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := kernel.MoveLink(ln, to); err != nil {
		return fmt.Errorf("moving link %s to the new program: %w", link, err)
	}
	return nil
}
