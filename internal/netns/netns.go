// SPDX-License-Identifier: Apache-2.0

// Package netns opens, enters and creates network namespaces.
//
// A namespace belongs to a thread, not to a process. All functions act on the calling OS thread.
// Code for another namespace runs through [Handle.Do] on a thread of its own, discarded afterwards.
package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/bounded"
	"golang.org/x/sys/unix"
)

// ErrNotNetns reports an existing path of another kind. A lost bind mount leaves a plain file under
// /run/netns, for example in a container that got the directory too late.
var ErrNotNetns = errors.New("not a network namespace")

// dirs are iproute2's directories of named namespaces. The second is a link to the first except on
// a few old systems.
var dirs = []string{"/run/netns", "/var/run/netns"}

// Handle is an open network namespace. It keeps the namespace alive until Close, even without
// processes and names.
type Handle struct {
	f    *os.File
	name string // as passed to Open or Create, "" otherwise
	dev  uint64
	ino  uint64
	born unix.Timespec // change time of the file in nsfs
}

// Current opens the namespace of the calling thread. /proc/self would be the main thread's.
func Current() (*Handle, error) {
	h, err := openPath("/proc/thread-self/ns/net", "")
	if err != nil {
		return nil, fmt.Errorf("open the current network namespace: %w", err)
	}
	return h, nil
}

// Open opens the namespace of a reference: "" is the current one, "pid:123" the one of a process,
// "net:[4026531840]" the one with that inode number (see [Find]). An absolute path is a file of
// nsfs. Anything else is a name as in `ip netns`. For an unknown name the error wraps
// [os.ErrNotExist], for a file of another kind [ErrNotNetns].
func Open(ref string) (*Handle, error) {
	switch {
	case ref == "":
		return Current()
	case strings.HasPrefix(ref, "pid:"):
		pid, err := strconv.Atoi(ref[len("pid:"):])
		if err != nil || pid <= 0 {
			return nil, fmt.Errorf("network namespace %q: want pid:NUMBER, for instance pid:4711", ref)
		}
		return OfPID(pid)
	case numbered(ref) != 0:
		return findInode("", numbered(ref))
	case filepath.IsAbs(ref):
		h, err := openPath(ref, "")
		if err != nil {
			return nil, fmt.Errorf("network namespace %s: %w", ref, err)
		}
		return h, nil
	}
	return openName(ref)
}

func openName(name string) (*Handle, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		h, err := openPath(filepath.Join(dir, name), name)
		if err == nil {
			return h, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("network namespace %q: %w", name, err)
		}
	}
	return nil, fmt.Errorf("network namespace %q: %s/%s: %w: `ip netns list` shows the existing names",
		name, dirs[0], name, os.ErrNotExist)
}

// OfPID opens the namespace of a process's main thread. For an unknown process the error wraps
// [os.ErrNotExist].
func OfPID(pid int) (*Handle, error) {
	h, err := bounded.Do(bounded.Process(pid), func() (*Handle, error) { return openPath(fmt.Sprintf("/proc/%d/ns/net", pid), "") }, func(h *Handle, err error) {
		if err == nil {
			h.Close()
		}
	})
	switch {
	case err == nil:
		return h, nil
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("network namespace of process %d: there is no such process: %w", pid, err)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("network namespace of process %d: run as root or with CAP_SYS_PTRACE: %w", pid, err)
	}
	return nil, fmt.Errorf("network namespace of process %d: %w", pid, err)
}

func openPath(path, name string) (*Handle, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	h := &Handle{f: f, name: name}
	if err := h.identify(); err != nil {
		f.Close()
		return nil, err
	}
	return h, nil
}

// identify checks the kind of namespace (ioctl_nsfs(2)) and stores its identity.
func (h *Handle) identify() error {
	kind, err := unix.IoctlRetInt(h.FD(), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		return ErrNotNetns
	}
	var st unix.Stat_t
	if err := unix.Fstat(h.FD(), &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	h.dev, h.ino, h.born = st.Dev, st.Ino, st.Ctim
	return nil
}

// FD returns the open descriptor, valid until Close.
func (h *Handle) FD() int { return int(h.f.Fd()) }

// Close releases the namespace.
func (h *Handle) Close() error { return h.f.Close() }

// Inode returns the namespace's inode number. The kernel reuses the numbers of deleted namespaces,
// so pair it with Cookie for permanent use.
func (h *Handle) Inode() uint64 { return h.ino }

// Ours reports whether the namespace's owner is the user namespace of this process (NS_GET_USERNS,
// ioctl_nsfs(2)). Every user can make a user namespace with network namespaces of its own.
func (h *Handle) Ours() bool {
	fd, err := unix.IoctlRetInt(h.FD(), unix.NS_GET_USERNS)
	if err != nil {
		return false // the owner is no descendant of ours
	}
	defer unix.Close(fd)
	var owner, own unix.Stat_t
	return unix.Fstat(fd, &owner) == nil && unix.Stat("/proc/self/ns/user", &own) == nil && owner.Dev == own.Dev && owner.Ino == own.Ino
}

// String returns "net:[4026531840]", as in /proc/PID/ns, followed by the name used to open it, if
// any.
func (h *Handle) String() string {
	s := fmt.Sprintf("net:[%d]", h.ino)
	if h.name != "" {
		s += " " + h.name
	}
	return s
}

// Same reports whether both handles are of one namespace.
func (h *Handle) Same(o *Handle) bool { return h.dev == o.dev && h.ino == o.ino }
