// SPDX-License-Identifier: Apache-2.0

package links

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Devices are the numbers of the interfaces of the caller's network namespace, by name and by alternative name.
func Devices() (map[string]int, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	out := map[string]int{}
	for _, l := range all {
		a := l.Attrs()
		for _, name := range append(a.AltNames, a.Name) {
			out[name] = a.Index
		}
	}
	return out, nil
}

// DeviceProblem says why a session does not go by its device any more, used being the number that it goes by, 0 for none; "": it does. again: the
// device is there, and the session can begin anew. all are [Devices].
func DeviceProblem(all map[string]int, device string, used int) (problem string, again bool) {
	now, there := all[device]
	switch {
	case !there:
		return fmt.Sprintf("device %s is not there", device), false
	case now != used:
		return fmt.Sprintf("device %s was made again, or came later, and the session does not use it yet", device), true
	}
	return "", false
}
