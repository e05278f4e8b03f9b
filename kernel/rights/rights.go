// SPDX-License-Identifier: Apache-2.0

// Package rights knows the modes of pins and records. Pins are the owner's alone. A group lists their directories and
// reads the records; everything else it asks weir serve.
package rights

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

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
	return IsPin(rel)
}

// Of returns the mode of a directory, pin or record. A group cannot have pins for reading only: the kernel pins a
// read-only descriptor again, in any BPF file system with a directory open to the reader, and opens the new pin for
// writing. It opens links only for writing anyway.
func Of(path string, dir bool) os.FileMode {
	switch {
	case dir:
		return 0o750
	case IsPin(path):
		return 0o600
	}
	return 0o640
}

// IsPin reports whether a path has the name of a pin, not of a record or directory.
func IsPin(path string) bool {
	switch base := filepath.Base(path); base {
	case "meta", "swap", "prog_attaching":
		return true
	default:
		return strings.HasPrefix(base, "map_") || strings.HasPrefix(base, "link_")
	}
}

// Links returns an error about a symbolic link among the pins of a root. Each change stops at one: it gives the pins
// their owner and mode.
func Links(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case path == root:
			return nil
		case err != nil:
			return nil //nolint:nilerr // removed meanwhile, or closed to this user
		case !IsOwn(path[len(root)+1:], d.IsDir()):
			if d.IsDir() {
				return fs.SkipDir
			}
		case d.Type() == fs.ModeSymlink:
			return fmt.Errorf("open %s: it is a symbolic link: remove it", path)
		}
		return nil
	})
}
