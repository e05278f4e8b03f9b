// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// drop deletes a device of the load balancer's.
func (s *scene) drop(t *testing.T, device string) {
	t.Helper()
	do(t, s.middle, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
}

// faults are the devices of the one load balancer at which nothing of it runs, with the reasons.
func faults(t *testing.T, root *kernel.Root) string {
	t.Helper()
	all, err := Statuses(t.Context(), root)
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	var out []string
	for _, d := range all[0].Devices {
		out = append(out, d.Device+": "+d.Reason)
	}
	return strings.Join(out, "; ")
}

// Status and doctor tell of a device that is gone, and of one that is another one by now, until the data path is at it again.
func TestDeviceFaults(t *testing.T) {
	for name, tcx := range map[string]bool{"links": true, "filters": false} {
		t.Run(name, func(t *testing.T) {
			if !tcx {
				was := hasTCX
				hasTCX = func() bool { return false }
				defer func() { hasTCX = was }()
			} else if !hasTCX() {
				t.Skip("need: kernel: tcx (Linux 6.6)")
			}
			sc, root := published(t)
			if got := faults(t, root); got != "" {
				t.Errorf("all devices are there: %s", got)
			}
			sc.drop(t, "c")
			if got := faults(t, root); got != "c: there is no such interface" {
				t.Errorf("c is gone: %s", got)
			}
			found := ""
			do(t, sc.middle, func() error {
				all, err := Feature{}.Examine(t.Context(), root)
				for _, f := range all {
					found += f.Object + " " + f.Text + "\n"
				}
				return err
			})
			if !strings.Contains(found, "load balancer test device c of namespace") {
				t.Errorf("doctor: %s", found)
			}
			nstest.Cable(t, sc.client, "w0", sc.middle, "c")
			if got := faults(t, root); got != "c: no program of the load balancer is attached" {
				t.Errorf("c is another one: %s", got)
			}
			sc.f.Close()
			sc.open(t, root)
			if got := faults(t, root); got != "" {
				t.Errorf("the data path is at c again: %s", got)
			}
		})
	}
}
