// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/kernel"
)

// A load balancer starts when all of its devices exist. Later it works with the existing ones. The agent restarts when a device appears.

// attachDevices attaches lb_in to the devices. With running it continues an earlier data path and skips absent devices.
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

// awaitDevices returns an error wrapping [feature.ErrDevices] when an absent device appears, a device is replaced, or one of the
// load balancer's own devices is gone. It returns nil when ctx is done.
func (f *DataPath) awaitDevices(ctx context.Context) error {
	return feature.AwaitDevices(ctx, f.ns, func() string {
		// Nobody else creates these again, and their routes disappear with them.
		if locate.Missing(f.buffer.Ifindex) {
			return "the buffer device is gone"
		}
		if f.tunnel != 0 && locate.Missing(f.tunnel) {
			return "the tunnels' device is gone"
		}
		if changed, _ := feature.ChangedDevices(f.devices); len(changed) > 0 {
			return strings.Join(changed, ", ") + " has appeared"
		}
		return ""
	})
}

// deviceFaults returns the device faults of a load balancer, or none with unreadable pins: other checks report those.
func deviceFaults(root *kernel.Root, inst kernel.Instance) []DeviceFault {
	u, err := store.Open(root, inst, "counts")
	if err != nil {
		return nil
	}
	defer u.Close()
	return feature.DeviceFaults(u, u.Spec.filled().devices(), attachment.Runs)
}
