// SPDX-License-Identifier: Apache-2.0

package users

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// names are the capabilities in remedies.
var names = map[int]string{
	unix.CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE", unix.CAP_DAC_READ_SEARCH: "CAP_DAC_READ_SEARCH", unix.CAP_KILL: "CAP_KILL", unix.CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE",
	unix.CAP_NET_RAW: "CAP_NET_RAW", unix.CAP_SETGID: "CAP_SETGID", unix.CAP_SETPCAP: "CAP_SETPCAP", unix.CAP_SETUID: "CAP_SETUID",
}

// Lacking adds the remedy to a permission error of a process without a capability. Other errors stay as they are.
func Lacking(err error, capability int) error {
	if !errors.Is(err, os.ErrPermission) || Has(capability) {
		return err
	}
	name := names[capability]
	return fmt.Errorf("%w: this process lacks %s: add it to AmbientCapabilities= and CapabilityBoundingSet= of its unit, or run as root", err, name)
}

// NotIn adds the remedy to a permission error of a process that gives a file of its own to a group. It needs no
// capability for its own groups.
func NotIn(err error, gid int) error {
	if !errors.Is(err, os.ErrPermission) || Has(unix.CAP_CHOWN) {
		return err
	}
	name := GroupName(gid)
	return fmt.Errorf("%w: this process is not in group %s: add SupplementaryGroups=%s to its unit, or run as root", err, name, name)
}
