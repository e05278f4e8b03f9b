// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel/instances"
)

// DeviceFault is a device at which nothing of an instance runs.
type DeviceFault struct {
	Device string `json:"device"`
	Reason string `json:"reason"`
	Absent bool   `json:"-"`
}

// DeviceRemedy is what attaches the program of an agent to a device that is there.
const DeviceRemedy = "weir serve attaches it to an interface that was made again, weir apply recovers one that was taken off"

// DeviceFaults finds the devices at which nothing of an instance runs, as far as this process may enter its network namespace. runs reports
// whether it does at the number of an interface, links being the names of the instance's; it is called in the namespace.
func DeviceFaults[S any](u *instances.InUse[S], devices []string, runs func(ifindex int, links []string) bool) (out []DeviceFault) {
	links, err := u.Pins.Links()
	if err != nil {
		return nil // a fault of its pins
	}
	_ = u.Netns.Do(func() error { // another network namespace than this process may enter has none
		for _, name := range devices {
			l, err := netlink.LinkByName(name) // net.InterfaceByName reads all links
			switch {
			case err != nil:
				out = append(out, DeviceFault{Device: name, Reason: "there is no such interface", Absent: true})
			case !runs(l.Attrs().Index, links):
				out = append(out, DeviceFault{Device: name, Reason: "no program is attached"})
			}
		}
		return nil
	})
	return out
}

// ErrDevices says that the devices of an agent are others: it begins anew.
var ErrDevices = errors.New("the devices are others")

// devicesEvery is how often an agent looks for devices.
const devicesEvery = time.Second

// AwaitDevices returns an error that wraps [ErrDevices] once changed gives a reason, and nil when ctx is done. changed is called in the
// network namespace.
func AwaitDevices(ctx context.Context, ns *netns.Handle, changed func() (reason string)) error {
	for range (Loop{Every: devicesEvery, Later: true}).Turns(ctx) {
		reason := ""
		if err := ns.Do(func() error { reason = changed(); return nil }); err == nil && reason != "" {
			return fmt.Errorf("%w: %s", ErrDevices, reason)
		}
	}
	return nil
}

// RunAnew runs an agent, again each time that it ends with [ErrDevices]. anew is told of it.
func RunAnew(ctx context.Context, run func() error, anew func(reason error)) error {
	for {
		err := run()
		if !errors.Is(err, ErrDevices) || ctx.Err() != nil {
			return err
		}
		anew(err)
	}
}

// ChangedDevices lists devices that are there by another number than before: they came, or were made again. was are the numbers, 0 of a device
// that was absent. absent lists those that are not there. The caller is in the network namespace.
func ChangedDevices(was map[string]int) (changed, absent []string) {
	for _, name := range slices.Sorted(maps.Keys(was)) {
		if l, err := netlink.LinkByName(name); err != nil {
			absent = append(absent, name)
		} else if l.Attrs().Index != was[name] {
			changed = append(changed, name)
		}
	}
	return changed, absent
}
