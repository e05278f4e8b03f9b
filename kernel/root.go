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
)

// DefaultRoot is where weir pins, unless told otherwise by --root or WEIR_ROOT.
const DefaultRoot = "/sys/fs/bpf/weir"

// HostScope stands in place of a network namespace for instances that span them.
const HostScope = "host"

// Names that end so are directories being put together or taken apart. Names
// of instances cannot hold the mark, and bpffs refuses names with dots.
const (
	stagedSuffix = "+new"
	retireSuffix = "+old"
)

var (
	// ErrNotExist says that an instance is not published.
	ErrNotExist = errors.New("not there")
	// ErrNotBPFFS says that the root is on no BPF file system, and so without pins.
	ErrNotBPFFS = errors.New("not on a BPF file system")
	// ErrUnreadable says that this user may not read the pins.
	ErrUnreadable = errors.New("no permission to read weir's pins")
)

// Instance names one directory of pins: one unit of publication.
type Instance struct {
	Scope   string // inode number of a network namespace, or HostScope
	Feature string
	Name    string
}

func (i Instance) String() string { return i.Scope + "/" + i.Feature + "/" + i.Name }

// validate refuses names that would leave the tree or clash with the marks.
func (i Instance) validate() error {
	for _, s := range []string{i.Scope, i.Feature, i.Name} {
		if !validName(s) {
			return fmt.Errorf("instance %q: %q is no name for a pin: use letters, digits, - and _, or a leading @", i, s)
		}
	}
	return nil
}

// validName accepts what bpffs and the layout can hold: letters, digits, '-',
// '_', and '@' in front for instances of weir's own.
func validName(s string) bool {
	s = strings.TrimPrefix(s, "@")
	return s != "" && len(s) <= 63 && strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_')
	}) < 0
}

// ValidName says whether a service or other instance may be called s: 1 to 63
// letters, digits, '-' and '_'.
func ValidName(s string) bool { return validName(s) && s[0] != '@' }

// Root is the directory of weir's pins, for reading. It is a value: nothing is
// held open between calls, so what a reader sees is what is there now.
type Root struct {
	path string
}

// OpenRoot returns the pins below path; they need not exist. An empty path is
// WEIR_ROOT or, without it, DefaultRoot.
func OpenRoot(path string) *Root {
	if path == "" {
		path = os.Getenv("WEIR_ROOT")
	}
	if path == "" {
		path = DefaultRoot
	}
	return &Root{path: filepath.Clean(path)}
}

// Path is the directory.
func (r *Root) Path() string { return r.path }

func (r *Root) dir(i Instance) string { return filepath.Join(r.path, i.Scope, i.Feature, i.Name) }

// Instances lists the published instances of a feature in all scopes, in order
// of scope and name. An empty feature lists those of every feature. Instances of
// a namespace whose inode number is another's now are left out.
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

// instancesIn lists the instances of a feature, or of all, in one scope.
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

// names lists the published directories in dir; a missing dir has none.
func (r *Root) names(dir string) ([]string, error) {
	all, err := r.allNames(dir)
	return slices.DeleteFunc(all, func(n string) bool { return !validName(n) }), err
}

// allNames lists every directory in dir, those in transit included.
func (r *Root) allNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if ns := ipNetnsExec(); ns != "" && dir == r.path {
			return nil, fmt.Errorf("%w: 'ip netns exec %s' has a /sys of its own, without them: run weir without it; it shows every namespace's", ErrUnreadable, ns)
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

// unreadable explains whose group one must be in.
func (r *Root) unreadable(path string) error {
	who := "root"
	if st, err := os.Stat(r.path); err == nil {
		who = fmt.Sprintf("root or group %d", st.Sys().(*syscall.Stat_t).Gid)
	}
	return fmt.Errorf("%w (%s): run as %s, or ask a running 'weir serve' through its socket", ErrUnreadable, path, who)
}

// CheckName says why no pins can be at this path: bpffs keeps names with dots for itself,
// and answers with EPERM.
func (r *Root) CheckName() error {
	for p := r.path; p != filepath.Dir(p); p = filepath.Dir(p) {
		var fs unix.Statfs_t
		name := filepath.Base(p)
		if strings.Contains(name, ".") && unix.Statfs(filepath.Dir(p), &fs) == nil && fs.Type == unix.BPF_FS_MAGIC {
			return fmt.Errorf("pin root %s: a BPF file system has no names with dots: take another than %q, like %q", r.path, name, strings.ReplaceAll(name, ".", "-"))
		}
	}
	return nil
}

// bpffsDir is where hosts have their BPF file system. It is mounted where it is missing.
const bpffsDir = "/sys/fs/bpf"

// Located returns an error that wraps [ErrNotBPFFS] if neither the root nor its parent is on a BPF file system.
func (r *Root) Located() error {
	if strings.HasPrefix(r.path, bpffsDir+"/") {
		return nil
	}
	there := true
	for _, path := range []string{r.path, filepath.Dir(r.path)} {
		var fs unix.Statfs_t
		err := unix.Statfs(path, &fs)
		switch {
		case err == nil && fs.Type != unix.BPF_FS_MAGIC:
			return r.notLocated(there)
		case !errors.Is(err, os.ErrNotExist):
			return nil // it is, or this user may not know
		}
		there = false
	}
	return r.notLocated(false)
}

// notLocated is the error about a root that is on no BPF file system. It names no mount that would hide anything: that of an empty
// directory, and of one that does not exist.
func (r *Root) notLocated(there bool) error {
	const remedy = "name a path below " + bpffsDir + " by --root or $WEIR_ROOT"
	if !there {
		return fmt.Errorf("pin root %[1]s does not exist (%[2]w): %[3]s, or make a file system there: mkdir -p %[1]s && mount -t bpf bpf %[1]s", r.path, ErrNotBPFFS, remedy)
	}
	if e, err := os.ReadDir(r.path); err == nil && len(e) == 0 {
		return fmt.Errorf("pin root %[1]s is %[2]w: %[3]s, or make a file system there: mount -t bpf bpf %[1]s", r.path, ErrNotBPFFS, remedy)
	}
	return fmt.Errorf("pin root %s is %w: %s", r.path, ErrNotBPFFS, remedy)
}

// ensure makes the root directory, mounting a bpffs below it when none is
// there: minimal systems and fresh mount namespaces have none.
func (r *Root) ensure() error {
	if err := errors.Join(r.CheckName(), r.Located()); err != nil {
		return err
	}
	if err := os.Mkdir(r.path, 0o750); err == nil || errors.Is(err, os.ErrExist) {
		var fs unix.Statfs_t
		if err := unix.Statfs(r.path, &fs); errors.Is(err, os.ErrNotExist) {
			return nil // another command removed it just now; Lock comes here again
		} else if err != nil {
			return fmt.Errorf("pin root %s: %w: run as root", r.path, err)
		}
		if fs.Type == unix.BPF_FS_MAGIC {
			return nil
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
		return fmt.Errorf("pin root %s: %w: make its parent first: mkdir -p %s", r.path, err, mount)
	}
	if fs.Type != unix.BPF_FS_MAGIC {
		if mount != bpffsDir {
			return r.notLocated(false)
		}
		if ns := ipNetnsExec(); ns != "" {
			return fmt.Errorf("'ip netns exec %[1]s' has a /sys of its own, and what weir pinned there would end with this command: run weir without it, and name the namespace with --netns %[1]s, or netns: %[1]s in the configuration; what has neither (lb, handoff.backend): nsenter --net=/run/netns/%[1]s weir …", ns)
		}
		if err := unix.Mount("bpf", mount, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0711"); err != nil {
			return fmt.Errorf("mounting the BPF file system on %s: %w", mount, err)
		}
	}
	if err := os.Mkdir(r.path, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("making the pin root: %w: run as root", err)
	}
	return nil
}

// ipNetnsExec returns the name of the network namespace if this process was started by ip netns exec, which mounts a
// sysfs by that name over /sys (netns_switch in iproute2's lib/namespace.c) for as long as its command runs; else "".
func ipNetnsExec() string {
	text, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return ""
	}
	name := ""
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if i := slices.Index(f, "-"); len(f) > 4 && f[4] == "/sys" && i > 0 && len(f) > i+2 && f[i+1] == "sysfs" {
			name = f[i+2] // the last one is on top
		}
	}
	if strings.Contains(name, "/") {
		return ""
	}
	if _, err := os.Stat("/run/netns/" + name); name == "" || err != nil {
		return ""
	}
	return name
}

// gid is the group that may read: the root directory's own.
func (r *Root) gid() int {
	st, err := os.Stat(r.path)
	if err != nil {
		return 0
	}
	return int(st.Sys().(*syscall.Stat_t).Gid)
}

// Writable returns an error where this user can never pin: the root is on no BPF file system, or belongs to others. Another
// reason, such as a file system that is mounted late, may pass.
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
