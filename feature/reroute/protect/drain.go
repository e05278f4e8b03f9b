// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// errNoPath reports an unknown path name.
var errNoPath = errors.New("no such path")

// Drain takes the link of a path out of use at once, so all paths of the link are rerouted. The drain survives this
// process and later configurations; [Undrain] ends it. A path is named NAME, or NETNS/NAME if several namespaces have
// the name.
func Drain(l *kernel.WriteLock, path string) error { return drain(l, path, true) }

// Undrain ends the drain of a path's link at once. Liveness or a missing carrier can still keep the link out of use.
func Undrain(l *kernel.WriteLock, path string) error { return drain(l, path, false) }

func drain(l *kernel.WriteLock, name string, on bool) error {
	i, device, err := findPath(l.Root, name)
	if err != nil {
		return err
	}
	return drainDevice(l, i, device, on)
}

// findPath returns the instance and the device of a path.
func findPath(r *kernel.Root, name string) (i kernel.Instance, device string, err error) {
	all, unreadable, err := store.All(r)
	if err != nil {
		return i, "", err
	}
	var found []kernel.Instance
	var names []string
	for _, rec := range all {
		for _, p := range rec.Spec.Paths {
			if full := rec.Ref + "/" + p.Name; p.Name == name || full == name {
				found, names, device = append(found, rec.Instance), append(names, full), p.Device
			}
		}
	}
	switch len(found) {
	case 0:
		if err := unreadable.Err(); err != nil {
			return i, "", fmt.Errorf("path %q: %w among the readable ones: %w", name, errNoPath, err)
		}
		return i, "", fmt.Errorf("path %q: %w: weir reroute status lists them", name, errNoPath)
	case 1:
		return found[0], device, nil
	}
	return i, "", fmt.Errorf("path %q is in several network namespaces: use one of %s", name, strings.Join(names, ", "))
}

func drainDevice(l *kernel.WriteLock, i kernel.Instance, device string, on bool) error {
	whole, err := readSpec(l.Root, i)
	if err != nil {
		return err
	}
	ns, err := netns.Find(whole.Netns, whole.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	index := 0
	err = ns.Do(func() error {
		dev, err := netlink.LinkByName(device)
		if err == nil {
			index = dev.Attrs().Index
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("interface %s: %w", device, err)
	}
	o, err := l.Open(i, pinLinks)
	if err != nil {
		return err
	}
	defer o.Close()
	w, err := links.MapWords(o.Maps[pinLinks])
	if err != nil {
		return err
	}
	defer w.Close()
	w.Set(links.Slot(index), links.DrainByte, on)
	return nil
}
