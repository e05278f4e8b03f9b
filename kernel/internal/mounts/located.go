// SPDX-License-Identifier: Apache-2.0

package mounts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// BPFDir is the usual mount point of the BPF file system. weir mounts one there if it is missing.
const BPFDir = "/sys/fs/bpf"

// ErrNotBPFFS is returned for a pin root outside a BPF file system.
var ErrNotBPFFS = errors.New("not on a BPF file system")

// CheckName reports an impossible pin root: bpffs rejects names with dots, with EPERM.
func CheckName(root string) error {
	for p := root; p != filepath.Dir(p); p = filepath.Dir(p) {
		var fs unix.Statfs_t
		name := filepath.Base(p)
		if strings.Contains(name, ".") && unix.Statfs(filepath.Dir(p), &fs) == nil && fs.Type == unix.BPF_FS_MAGIC {
			return fmt.Errorf("pin root %s: a BPF file system rejects names with dots: rename %q, for example to %q", root, name, strings.ReplaceAll(name, ".", "-"))
		}
	}
	return nil
}

// Located returns an error wrapping [ErrNotBPFFS] if neither a pin root nor its parent is on a BPF file system.
func Located(root string) error {
	if strings.HasPrefix(root, BPFDir+"/") {
		return nil
	}
	there := true
	for _, path := range []string{root, filepath.Dir(root)} {
		var fs unix.Statfs_t
		err := unix.Statfs(path, &fs)
		switch {
		case err == nil && fs.Type != unix.BPF_FS_MAGIC:
			return NotLocated(root, there)
		case !errors.Is(err, os.ErrNotExist):
			return nil // located, or unreadable for this user
		}
		there = false
	}
	return NotLocated(root, false)
}

// NotLocated returns the error for a pin root outside a BPF file system. Its remedy hides no files: it names only an
// empty or missing directory as a mount point.
func NotLocated(root string, there bool) error {
	const remedy = "name a path below " + BPFDir + " by --root or $WEIR_ROOT"
	if !there {
		return fmt.Errorf("pin root %[1]s does not exist (%[2]w): %[3]s, or create a file system there: mkdir -p %[1]s && mount -t bpf bpf %[1]s", root, ErrNotBPFFS, remedy)
	}
	if e, err := os.ReadDir(root); err == nil && len(e) == 0 {
		return fmt.Errorf("pin root %[1]s is %[2]w: %[3]s, or create a file system there: mount -t bpf bpf %[1]s", root, ErrNotBPFFS, remedy)
	}
	return fmt.Errorf("pin root %s is %w: %s", root, ErrNotBPFFS, remedy)
}
