// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// AwaitDevices returns an error wrapping [feature.ErrDevices] when devices were recreated and all exist, as Open
// requires. It returns nil when ctx is done. ns is the network namespace of the quarantine.
func (g *Quarantine) AwaitDevices(ctx context.Context, ns *netns.Handle) error {
	return feature.AwaitDevices(ctx, ns, func() string {
		changed, absent := feature.ChangedDevices(g.devices)
		if len(changed) == 0 || len(absent) > 0 {
			return ""
		}
		return strings.Join(changed, ", ") + " was made again"
	})
}

// Failures returns the devices without a quarantine's programs, in all network namespaces accessible to this process.
func Failures(all []instances.Record[[]string], r *kernel.Root) (out []feature.Finding) {
	for _, rec := range all {
		for _, d := range DeviceFaults(r, rec.Instance) {
			remedy := feature.DeviceRemedy
			if d.Absent {
				remedy = "restore the interface, with weir serve running, or remove it from handoff.backend.devices"
			}
			out = append(out, feature.Failure("quarantine of netns "+rec.Scope,
				fmt.Sprintf("device %s: %s: packets of moving sessions are not blocked there", d.Device, d.Reason), remedy))
		}
	}
	return out
}

// DeviceFaults lists the devices of a quarantine without its programs. An unreadable quarantine has none here,
// because other faults report it.
func DeviceFaults(r *kernel.Root, i kernel.Instance) (out []feature.DeviceFault) {
	u, err := Store.Open(r, i, pinSessions)
	if err != nil {
		return nil
	}
	defer u.Close()
	return feature.DeviceFaults(u, u.Spec, runsAt)
}

// runsAt reports whether the programs of both directions are attached at an interface of the caller's network namespace.
func runsAt(ifindex int, links []string) bool {
	for side, egress := range map[string]bool{linkIn: false, linkOut: true} {
		if len(links) > 0 {
			if !slices.Contains(links, side+strconv.Itoa(ifindex)) {
				return false
			}
		} else if program, err := filterAt(ifindex, egress).Program(); err == nil && program == 0 {
			return false
		}
	}
	return true
}
