// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/kernel"
)

// A load balancer begins when all of its devices are there. From then on it works at those that are there: the agent begins anew when
// one comes, or comes back.

// errDevices says that a device has come, or that one of the load balancer's own has gone.
var errDevices = errors.New("the devices are others")

// devicesEvery is how often an agent looks for devices.
const devicesEvery = time.Second

// attachDevices attaches lb_in at the devices. running: the data path goes on with an earlier one, and without devices that are absent.
func (f *DataPath) attachDevices(devices []string, running bool) error {
	f.devices = map[string]int{}
	for _, name := range devices {
		i, err := net.InterfaceByName(name)
		if err != nil && running {
			f.devices[name] = 0
			continue
		} else if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		if err := f.attach(kernel.TCX{Ifindex: i.Index, Device: name}, f.maps.LbIn); err != nil {
			return err
		}
		f.devices[name] = i.Index
	}
	return nil
}

// awaitDevices returns errDevices when a device comes that was absent, or is another one, or when one of the load balancer's own is
// gone, and nil when ctx is done.
func (f *DataPath) awaitDevices(ctx context.Context) error {
	for range (feature.Loop{Every: devicesEvery, Later: true}).Turns(ctx) {
		changed := ""
		err := f.ns.Do(func() error {
			for name, was := range f.devices {
				if i, err := net.InterfaceByName(name); err == nil && i.Index != was {
					changed = name + " has come"
				}
			}
			// Nobody else makes these anew, and their routes go with them.
			if missing(f.buffer.Ifindex) {
				changed = "the device of buffered packets is gone"
			}
			if f.tunnel != 0 && missing(f.tunnel) {
				changed = "the tunnels' device is gone"
			}
			return nil
		})
		if err == nil && changed != "" {
			return fmt.Errorf("%w: %s", errDevices, changed)
		}
	}
	return nil
}

// missing reports whether an interface has gone from the caller's network namespace.
func missing(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return errors.As(err, &netlink.LinkNotFoundError{})
}

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
		for _, name := range rec.Spec.filled().devices() {
			i, err := net.InterfaceByName(name)
			switch {
			case err != nil:
				out = append(out, DeviceFault{Device: name, Reason: "there is no such interface"})
			case !attachment.Runs(i.Index, links):
				out = append(out, DeviceFault{Device: name, Reason: "no program of the load balancer is attached"})
			}
		}
		return nil
	})
	return out
}
