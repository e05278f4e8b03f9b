// SPDX-License-Identifier: Apache-2.0

package links

import (
	"fmt"

	"github.com/weir-project/weir/internal/dump"
)

// Devices returns the indexes of the caller's network interfaces by name and alternative name.
func Devices() (map[string]int, error) {
	all, err := dump.LinkList()
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

// DeviceProblem explains why a session does not use its device any more, or returns "". used is the session's device
// index, 0 for none. all comes from [Devices]. again reports that the device exists and the session can restart.
func DeviceProblem(all map[string]int, device string, used int) (problem string, again bool) {
	now, there := all[device]
	switch {
	case !there:
		return fmt.Sprintf("there is no interface %s", device), false
	case now != used:
		return fmt.Sprintf("device %s was recreated or appeared later, and the session does not use it yet", device), true
	}
	return "", false
}
