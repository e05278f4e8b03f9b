// SPDX-License-Identifier: Apache-2.0

// Package netns opens, enters and makes network namespaces.
//
// A namespace belongs to a thread, not to a process: everything here is about
// the calling OS thread, and code that must run in another namespace goes
// through [Handle.Do], which uses a thread of its own and throws it away.
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

// ErrNotNetns says that a path exists but is no network namespace. A plain
// file under /run/netns is what a namespace leaves behind when its bind mount
// is lost, for instance in a container that was given the directory too late.
var ErrNotNetns = errors.New("not a network namespace")

// dirs are the places where iproute2 keeps named namespaces; the second is a
// link to the first except on a few old systems.
var dirs = []string{"/run/netns", "/var/run/netns"}

// Handle is an open network namespace. It keeps the namespace alive until
// Close, also when its last process and its name are gone.
type Handle struct {
	f    *os.File
	name string // as given to Open or Create, "" otherwise
	dev  uint64
	ino  uint64
	born unix.Timespec // change time of the file in nsfs
}

// Current opens the namespace of the calling thread. Not /proc/self: that is
// the main thread's namespace, which may be another one.
func Current() (*Handle, error) {
	h, err := openPath("/proc/thread-self/ns/net", "")
	if err != nil {
		return nil, fmt.Errorf("open the current network namespace: %w", err)
	}
	return h, nil
}

// Open opens the namespace that ref names: "" is the current one, "pid:123"
// that of a process, "net:[4026531840]" the one with that inode number (see
// [Find]), an absolute path a file of nsfs, and anything else a name as
// `ip netns` uses it. A name that does not exist gives an error that wraps
// [os.ErrNotExist], a file of another kind one that wraps [ErrNotNetns].
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
	return nil, fmt.Errorf("network namespace %q: %s/%s: %w: `ip netns list` shows the names there are",
		name, dirs[0], name, os.ErrNotExist)
}

// OfPID opens the namespace of a process's main thread. A process that does not
// exist gives an error that wraps [os.ErrNotExist].
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

// identify checks the kind of namespace (ioctl_nsfs(2)) and notes its identity.
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

// FD is the open descriptor, valid until Close.
func (h *Handle) FD() int { return int(h.f.Fd()) }

// Close lets go of the namespace.
func (h *Handle) Close() error { return h.f.Close() }

// Inode is the namespace's inode number. The kernel reuses the numbers of
// namespaces that are gone: pair it with Cookie where it must stay true.
func (h *Handle) Inode() uint64 { return h.ino }

// String is "net:[4026531840]", as in /proc/PID/ns, with the name behind it if
// the namespace was opened by one.
func (h *Handle) String() string {
	s := fmt.Sprintf("net:[%d]", h.ino)
	if h.name != "" {
		s += " " + h.name
	}
	return s
}

// Same tells whether both handles are of one namespace.
func (h *Handle) Same(o *Handle) bool { return h.dev == o.dev && h.ino == o.ino }
