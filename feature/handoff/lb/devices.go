// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/kernel"
)

// A load balancer begins when all of its devices are there. From then on it works at those that are there: the agent begins anew when
// one comes, or comes back.

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

// awaitDevices returns an error that wraps [feature.ErrDevices] when a device comes that was absent, or is another one, or when one of
// the load balancer's own is gone, and nil when ctx is done.
func (f *DataPath) awaitDevices(ctx context.Context) error {
	return feature.AwaitDevices(ctx, f.ns, func() string {
		// Nobody else makes these anew, and their routes go with them.
		if missing(f.buffer.Ifindex) {
			return "the device of buffered packets is gone"
		}
		if f.tunnel != 0 && missing(f.tunnel) {
			return "the tunnels' device is gone"
		}
		if changed, _ := feature.ChangedDevices(f.devices); len(changed) > 0 {
			return strings.Join(changed, ", ") + " has come"
		}
		return ""
	})
}

// missing reports whether an interface has gone from the caller's network namespace.
func missing(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return errors.As(err, &netlink.LinkNotFoundError{})
}

// deviceFaults are those of a pinned load balancer: other faults tell of pins that cannot be read.
func deviceFaults(root *kernel.Root, inst kernel.Instance) []DeviceFault {
	u, err := store.Open(root, inst, "counts")
	if err != nil {
		return nil
	}
	defer u.Close()
	return feature.DeviceFaults(u, u.Spec.filled().devices(), attachment.Runs)
}
