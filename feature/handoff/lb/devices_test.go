// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// newStage returns a scene with servers for an agent yet to start. Its load balancer is removed at
// the end.
func newStage(t *testing.T) (*scene, *kernel.Root) {
	t.Helper()
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	t.Cleanup(func() {
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	return sc, root
}

// drop deletes a device of the load balancer.
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

// faults returns the device faults of the only load balancer.
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

// TestDeviceFaults checks that status and doctor report a missing or replaced device until the data
// path is attached again.
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
			if got := faults(t, root); got != "c: no program is attached" {
				t.Errorf("c is another one: %s", got)
			}
			if _, text := explains(t, root, sc.middle, "c", "tcp", client(service4, 5000), service4); !strings.Contains(text, "its program is not attached to c: weir serve attaches it") {
				t.Errorf("explain: %s", text)
			}
			sc.f.Close()
			sc.open(t, root)
			if got := faults(t, root); got != "" {
				t.Errorf("the data path is at c again: %s", got)
			}
		})
	}
}

// TestDevicesComeAndGo checks that the agent of a running load balancer works without an absent
// device, and attaches the device when it appears, even as another one. The plan reports it.
func TestDevicesComeAndGo(t *testing.T) {
	sc, root := newStage(t)
	ca := peertest.NewAuthority(t)
	const backends = "tunnel_mtu: 1450\nbackends:\n  h1: {number: 1, address: 10.2.0.2}\n  h2: {number: 2, address: 10.2.1.2}\n"
	text, more := fileOf(ca, sc.devices, backends), fileOf(ca, append(slices.Clone(sc.devices), "late"), backends)
	warns := func(want string) {
		t.Helper()
		if p := sc.plan(t, root, more); len(p.Warnings) != 1 || p.Warnings[0] != "lb: there is no interface late: the load balancer "+want {
			t.Errorf("warnings %q, want one that it %s", p.Warnings, want)
		}
	}
	warns("starts when it appears")
	up := func(s Status) bool { return s.Agent && len(s.Backends) == 2 && s.Backends[0].Up && s.Backends[1].Up }
	stop := running(t, sc, root, text)
	status(t, root, up)
	warns("works without it until it appears")
	c := dial(t, sc.client, service4)
	talks := func() {
		t.Helper()
		if _, err := ask(c, "a", patience); err != nil {
			t.Fatal(err)
		}
	}
	talks()
	stop()
	stop = running(t, sc, root, more)
	status(t, root, func(s Status) bool { return up(s) && len(s.Devices) == 1 && s.Devices[0].Device == "late" })
	talks()
	nstest.Cable(t, nstest.NewNetns(t), "w0", sc.middle, "late")
	status(t, root, func(s Status) bool { return up(s) && len(s.Devices) == 0 })
	sc.drop(t, "late")
	nstest.Cable(t, nstest.NewNetns(t), "w0", sc.middle, "late")
	status(t, root, func(s Status) bool { return up(s) && len(s.Devices) == 0 })
	talks()
	// Its own devices are created again: the buffer device and the tunnels' device.
	for _, own := range []string{"weir-lb-buffer", tunnel.Device} {
		sc.drop(t, own)
		status(t, root, func(s Status) bool {
			there := false
			do(t, sc.middle, func() error {
				_, err := netlink.LinkByName(own)
				there = err == nil
				return nil
			})
			return there && up(s) && len(s.Devices) == 0
		})
		talks()
	}
	n := dial(t, sc.client, service4)
	if _, err := ask(n, "a", patience); err != nil {
		t.Error("a new connection:", err)
	}
	stop()
	sc.drop(t, tunnel.Device)
	if got := faults(t, root); got != "weir-tun: there is no such interface" {
		t.Errorf("the tunnels' device is gone, and no agent runs: %s", got)
	}
	found, err := Feature{}.Examine(t.Context(), root)
	if err != nil || !slices.ContainsFunc(found, func(f feature.Finding) bool { return f.Remedy == "run weir serve: it creates the device again" }) {
		t.Errorf("doctor: %+v, %v", found, err)
	}
}
