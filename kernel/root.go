// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel/internal/mounts"
	"github.com/weir-project/weir/kernel/rights"
)

// DefaultRoot is the default pin root. --root and WEIR_ROOT override it.
const DefaultRoot = "/sys/fs/bpf/weir"

// HostScope is the scope of instances that span network namespaces.
const HostScope = "host"

// Suffixes of directories in construction or removal. Names of instances cannot contain +, and bpffs rejects names with
// dots.
const (
	stagedSuffix = "+new"
	retireSuffix = "+old"
)

var (
	// ErrNotExist is returned if an instance is not published.
	ErrNotExist = errors.New("not there")
	// ErrNotBPFFS is returned if the root is not on a BPF file system. It then has no pins.
	ErrNotBPFFS = mounts.ErrNotBPFFS
	// ErrUnreadable is returned if this user may not read the pins.
	ErrUnreadable = errors.New("no permission to read weir's pins")
)

// Instance names one directory of pins, the unit of publication.
type Instance struct {
	Scope   string // inode number of a network namespace, or HostScope
	Feature string
	Name    string
}

func (i Instance) String() string { return i.Scope + "/" + i.Feature + "/" + i.Name }

// validate rejects names that would leave the tree or clash with the suffixes.
func (i Instance) validate() error {
	for _, s := range []string{i.Scope, i.Feature, i.Name} {
		if !validName(s) {
			return fmt.Errorf("instance %q: %q is not a valid pin name: use letters, digits, - and _, or a leading @", i, s)
		}
	}
	return nil
}

// validName accepts letters, digits, '-' and '_', and a leading '@' for weir's own instances.
func validName(s string) bool {
	s = strings.TrimPrefix(s, "@")
	return s != "" && len(s) <= 63 && strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_')
	}) < 0
}

// ValidName reports whether s is a valid name of a service or another instance: 1 to 63 letters, digits, '-' and '_'.
func ValidName(s string) bool { return validName(s) && s[0] != '@' }

// Root is the directory of weir's pins, for reading. It holds nothing open between calls: each call reads the current
// state.
type Root struct {
	path string
}

// OpenRoot returns the pins below path, which need not exist. An empty path means WEIR_ROOT or, without it, DefaultRoot.
func OpenRoot(path string) *Root {
	if path == "" {
		path = os.Getenv("WEIR_ROOT")
	}
	if path == "" {
		path = DefaultRoot
	}
	return &Root{path: filepath.Clean(path)}
}

// Path returns the directory.
func (r *Root) Path() string { return r.path }

func (r *Root) dir(i Instance) string { return filepath.Join(r.path, i.Scope, i.Feature, i.Name) }

// Instances lists the published instances of a feature in all scopes, sorted by scope and name. An empty feature means
// all features. It omits instances of a gone namespace whose inode number another namespace has.
func (r *Root) Instances(feature string) ([]Instance, error) {
	var out []Instance
	scopes, err := r.names(r.path)
	if err != nil {
		return nil, err
	}
	for _, scope := range scopes {
		of, err := r.instancesIn(scope, feature)
		if err != nil {
			return nil, err
		}
		if len(of) > 0 && !r.passedOn(scope) {
			out = append(out, of...)
		}
	}
	return out, nil
}

// instancesIn lists the instances of a feature, or of all features, in one scope.
func (r *Root) instancesIn(scope, feature string) (out []Instance, err error) {
	features, err := r.names(filepath.Join(r.path, scope))
	if err != nil {
		return nil, err
	}
	for _, f := range features {
		if feature != "" && f != feature {
			continue
		}
		names, err := r.names(filepath.Join(r.path, scope, f))
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			out = append(out, Instance{Scope: scope, Feature: f, Name: n})
		}
	}
	return out, nil
}

// names lists the published directories in dir. A missing dir is empty.
func (r *Root) names(dir string) ([]string, error) {
	all, err := r.allNames(dir)
	return slices.DeleteFunc(all, func(n string) bool { return !validName(n) }), err
}

// allNames lists all directories in dir, including staged and retired ones.
func (r *Root) allNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if ns := mounts.OfIPNetns(); ns != "" && dir == r.path {
			return nil, fmt.Errorf("%w: 'ip netns exec %s' has a /sys of its own without pins: run weir outside it; it shows all namespaces", ErrUnreadable, ns)
		}
		return nil, nil
	case errors.Is(err, os.ErrPermission):
		if err := r.CheckName(); err != nil {
			return nil, err
		}
		return nil, r.unreadable(dir)
	case err != nil:
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// unreadable names the users and groups with access.
func (r *Root) unreadable(path string) error {
	who := "root"
	if gid, ok := r.Group(); ok && gid != 0 && !rights.IsPin(path) {
		who = "root or group " + users.GroupName(gid)
	}
	return fmt.Errorf("%w (%s): run as %s, or ask a running 'weir serve' through its socket", ErrUnreadable, path, who)
}

// CheckName reports an impossible path, or a symbolic link of another user in place of the root.
func (r *Root) CheckName() error {
	if st, err := os.Lstat(r.path); err == nil && st.Mode()&os.ModeSymlink != 0 {
		if owner := int(st.Sys().(*syscall.Stat_t).Uid); owner != 0 && owner != os.Geteuid() {
			return fmt.Errorf("pin root %s is a symbolic link of user %d: remove it (rm %[1]s)", r.path, owner)
		}
	}
	return mounts.CheckName(r.path)
}

// Located returns an error wrapping [ErrNotBPFFS] if neither the root nor its parent is on a BPF file system.
func (r *Root) Located() error { return mounts.Located(r.path) }

// ensure creates the root directory, and mounts a bpffs below it if needed: minimal systems and fresh mount namespaces
// have none.
func (r *Root) ensure() error {
	if err := errors.Join(r.CheckName(), r.Located()); err != nil {
		return err
	}
	if err := os.Mkdir(r.path, 0o750); err == nil || errors.Is(err, os.ErrExist) {
		var fs unix.Statfs_t
		if err := unix.Statfs(r.path, &fs); errors.Is(err, os.ErrNotExist) {
			return nil // another command has just removed it; Lock retries
		} else if err != nil {
			return fmt.Errorf("pin root %s: %w: run as root", r.path, err)
		}
		if fs.Type == unix.BPF_FS_MAGIC {
			return r.trusted()
		}
		if err == nil {
			os.Remove(r.path)
		}
	} else if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
		return err
	}
	mount := filepath.Dir(r.path)
	var fs unix.Statfs_t
	if err := unix.Statfs(mount, &fs); err != nil {
		return fmt.Errorf("pin root %s: %w: create its parent first: mkdir -p %s", r.path, err, mount)
	}
	if fs.Type != unix.BPF_FS_MAGIC {
		if mount != mounts.BPFDir {
			return mounts.NotLocated(r.path, false)
		}
		if ns := mounts.OfIPNetns(); ns != "" {
			return fmt.Errorf("'ip netns exec %[1]s' has a /sys of its own, and pins made there would end with this command: run weir outside it, and name the namespace with --netns %[1]s, or netns: %[1]s in the configuration; for lb and handoff.backend use nsenter --net=/run/netns/%[1]s weir …", ns)
		}
		if err := unix.Mount("bpf", mount, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0711"); err != nil {
			return fmt.Errorf("mount the BPF file system on %s: %w", mount, err)
		}
	}
	if err := os.Mkdir(r.path, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("create the pin root: %w: run as root", err)
	}
	return r.trusted()
}

// trusted rejects a pin root of another user: on a BPF file system with mode 1777, the kernel's default, anybody may
// create it before weir does. Its owner could exchange the pins.
func (r *Root) trusted() error {
	st, err := os.Lstat(r.path)
	if err != nil {
		return nil // another command has just removed it; Lock retries
	}
	owner := int(st.Sys().(*syscall.Stat_t).Uid)
	if owner == 0 || owner == os.Geteuid() || owner == uid() {
		return nil
	}
	return fmt.Errorf("pin root %s belongs to user %d, who could exchange its pins: remove it (rm -r %[1]s). If this is the user of weir serve, run weir prepare instead", r.path, owner)
}

// gid returns the group with read access: the group of the root directory.
func (r *Root) gid() int {
	gid, _ := r.Group()
	return gid
}

// Group returns the group with read access to the pins. ok is false without a root directory.
func (r *Root) Group() (gid int, ok bool) {
	st, err := os.Stat(r.path)
	if err != nil {
		return 0, false
	}
	return int(st.Sys().(*syscall.Stat_t).Gid), true
}

// Writable returns an error if this user can never pin: the root is outside a BPF file system, or belongs to another
// user. Temporary causes, such as a late mount, are not errors.
func (r *Root) Writable() error {
	if err := errors.Join(r.CheckName(), r.Located()); err != nil {
		return err
	}
	for _, path := range []string{r.path, filepath.Dir(r.path)} {
		err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
		if errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("pin root %s: %w: run as root", r.path, err)
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	return nil
}
