// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net"
	"slices"

	"github.com/weir-project/weir/kernel"
)

// deviceFaults are those of a pinned load balancer, as far as this process may see them: other faults tell of pins that cannot be read.
func deviceFaults(root *kernel.Root, inst kernel.Instance) (out []DeviceFault) {
	rec, err := store.Read(root, inst)
	if err != nil {
		return nil
	}
	o, err := root.Open(inst, "counts")
	if err != nil {
		return nil
	}
	defer o.Close()
	links, err := o.Links()
	if err != nil {
		return nil
	}
	ns, err := root.OpenNetns(inst)
	if err != nil {
		return nil
	}
	defer ns.Close()
	_ = ns.Do(func() error { // another network namespace than this process may enter has none
		for _, name := range rec.Spec.Devices {
			i, err := net.InterfaceByName(name)
			switch {
			case err != nil:
				out = append(out, DeviceFault{Device: name, Reason: "there is no such interface"})
			case !runsAt(i.Index, links):
				out = append(out, DeviceFault{Device: name, Reason: "no program of the load balancer is attached"})
			}
		}
		return nil
	})
	return out
}

// runsAt reports whether the program for packets from outside is attached at an interface of the caller's network namespace.
func runsAt(ifindex int, links []string) bool {
	if len(links) > 0 {
		return slices.Contains(links, linkName(ifindex, false))
	}
	program, err := clsact(ifindex, false).Program()
	return err != nil || program != 0
}
