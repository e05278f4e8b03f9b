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

// DeviceFault is a device without the program of an instance.
type DeviceFault struct {
	Device string `json:"device"`
	Reason string `json:"reason"`
	Absent bool   `json:"-"`
}

// DeviceRemedy is the remedy for an existing device without an agent's program.
const DeviceRemedy = "weir serve attaches it to a recreated interface; run weir apply after a detach"

// DeviceFaults returns the devices without the program of an instance. It returns none if this process may not enter the
// network namespace. runs reports whether the program is attached to an interface. links are the names of the instance's
// links. runs is called in the namespace.
func DeviceFaults[S any](u *instances.InUse[S], devices []string, runs func(ifindex int, links []string) bool) (out []DeviceFault) {
	links, err := u.Pins.Links()
	if err != nil {
		return nil // damaged pins, reported elsewhere
	}
	_ = u.Netns.Do(func() error { // an inaccessible network namespace yields no faults
		for _, name := range devices {
			l, err := netlink.LinkByName(name) // net.InterfaceByName would read all links
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

// ErrDevices is returned if the devices of an agent have changed. The agent then restarts.
var ErrDevices = errors.New("the devices have changed")

// devicesEvery is the interval of an agent's device checks.
const devicesEvery = time.Second

// AwaitDevices returns an error wrapping [ErrDevices] once changed returns a reason, and nil when ctx is done. changed
// is called in the network namespace.
func AwaitDevices(ctx context.Context, ns *netns.Handle, changed func() (reason string)) error {
	for range (Loop{Every: devicesEvery, Later: true}).Turns(ctx) {
		reason := ""
		if err := ns.Do(func() error { reason = changed(); return nil }); err == nil && reason != "" {
			return fmt.Errorf("%w: %s", ErrDevices, reason)
		}
	}
	return nil
}

// RunAnew runs an agent, and restarts it each time it ends with [ErrDevices]. anew is called before a restart.
func RunAnew(ctx context.Context, run func() error, anew func(reason error)) error {
	for {
		err := run()
		if !errors.Is(err, ErrDevices) || ctx.Err() != nil {
			return err
		}
		anew(err)
	}
}

// ChangedDevices lists the devices with another index than in was: new or recreated ones. An index of 0 in was means
// absent. absent lists the missing devices. The caller is in the network namespace.
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
