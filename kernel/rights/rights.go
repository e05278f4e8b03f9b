// SPDX-License-Identifier: Apache-2.0

// Package rights knows the modes of pins and records. The owner writes, and a group reads everything without secrets.
package rights

import (
	"os"
	"path/filepath"
	"strings"
)

// secrets holds the maps declared by [Secret], by feature and pin.
var secrets = map[[2]string]bool{}

// Secret declares maps of a feature's instances as secret, by their names in kernel.Pins: they hold keys. Only the owner
// can open them, and readers of the group ask weir serve. A feature declares them beside its list of pins, in an init
// function. Every change of rights then keeps them closed, including recoveries and changes of the group.
func Secret(feature string, maps ...string) {
	for _, name := range maps {
		secrets[[2]string{feature, "map_" + name}] = true
	}
}

// IsSecret reports whether a path is the pin of a secret map: ROOT/SCOPE/FEATURE/INSTANCE/PIN.
func IsSecret(path string) bool {
	return secrets[[2]string{filepath.Base(filepath.Dir(filepath.Dir(path))), filepath.Base(path)}]
}

// IsOwn reports whether a path below the root has a name of weir's: SCOPE/FEATURE/INSTANCE/PIN, or the lock's directory.
// A root that is a mount point has the kernel's maps.debug and progs.debug too, and perhaps pins of others.
func IsOwn(rel string, dir bool) bool {
	parts := strings.Split(rel, "/")
	if scope := parts[0]; scope == "+lock" {
		return dir && len(parts) == 1
	} else if scope != "host" && strings.Trim(scope, "0123456789") != "" {
		return false
	}
	if len(parts) < 4 || dir {
		return dir && len(parts) < 4
	}
	switch pin := parts[3]; pin {
	case "meta", "swap", "prog_attaching":
		return true
	default:
		return strings.HasPrefix(pin, "map_") || strings.HasPrefix(pin, "link_")
	}
}

// Of returns the mode of a pin or record. Links and secret maps are private to the owner. The kernel opens a link only
// for writing, and a writer may detach it.
func Of(path string, dir bool) os.FileMode {
	switch {
	case dir:
		return 0o750
	case strings.HasPrefix(filepath.Base(path), "link_"), IsSecret(path):
		return 0o600
	}
	return 0o640
}
