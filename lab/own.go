// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// runDir is weir's directory for sockets and records. The processes of a run see an empty one of their own, so a weir
// in use and a run cannot meet there. It ends with the last of these processes.
const runDir = "/run/weir"

// OwnMark is set in the environment of processes with a runDir of their own.
const OwnMark = "WEIR_LAB_OWN_DIR"

// errOwn is the failure of own, for NewEnv.
var errOwn error

// own executes this program again, in a mount namespace with an empty runDir. It returns without root, after an
// error, and in the executed program.
func own() {
	if os.Geteuid() != 0 || os.Getenv(OwnMark) != "" {
		return
	}
	if err := hide(); err != nil {
		errOwn = fmt.Errorf("hide %s from the run: %w", runDir, err)
		return
	}
	self, err := os.Executable()
	if err == nil {
		err = syscall.Exec(self, os.Args, append(os.Environ(), OwnMark+"=1"))
	}
	errOwn = err
}

// hide moves the calling thread to a mount namespace with an empty runDir. All other mounts stay shared with the
// machine: names of network namespaces, BPF file systems, cgroups.
func hide() error {
	if err := netns.ShareNames(); err != nil {
		return err
	}
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	for dir := runDir; ; dir = filepath.Dir(dir) {
		// Without this the new mount would appear on the machine. EINVAL: not a mount point.
		if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("make %s private: %w", dir, err)
		}
		if dir == "/" {
			break
		}
	}
	return unix.Mount("tmpfs", runDir, "tmpfs", 0, "mode=0755")
}

// strays lists objects of weir outside the names of a run. They have the inode number of one of its network namespaces
// as a name or as the end of a name: helper namespaces, and pins below another root.
func strays(scopes []string) (names, pins []string) {
	all, _ := netns.Names()
	for _, scope := range scopes {
		for _, n := range all {
			if strings.HasSuffix(n, "-"+scope) {
				names = append(names, n)
			}
		}
		found, _ := filepath.Glob(filepath.Join(bpffs, "*", scope))
		for _, dir := range found {
			if !strings.HasPrefix(dir, filepath.Join(bpffs, prefix)) {
				pins = append(pins, dir)
			}
		}
	}
	return names, pins
}
