// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Create creates a named network namespace with its loopback interface up, like `ip netns add`. The
// name is a bind mount under /run/netns. For an existing name the error wraps [os.ErrExist].
func Create(name string) (*Handle, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if err := prepareDir(dirs[0]); err != nil {
		return nil, fmt.Errorf("create network namespace %q: %w", name, err)
	}
	path := filepath.Join(dirs[0], name)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil, fmt.Errorf("create network namespace %q: %w", name, err)
	}
	f.Close()
	h, err := bindNew(path, name)
	if err != nil {
		_ = unix.Unmount(path, unix.MNT_DETACH) // may not be mounted yet
		os.Remove(path)
		return nil, fmt.Errorf("create network namespace %q: %w", name, err)
	}
	return h, nil
}

func bindNew(path, name string) (*Handle, error) {
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w (needs CAP_SYS_ADMIN)", err)
		}
		if err := LoopbackUp(); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind on %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return openPath(path, name)
}

// ShareNames makes the directory of names a shared mount. Call it before entering a mount namespace, to create names
// there for all.
func ShareNames() error { return prepareDir(dirs[0]) }

// prepareDir makes dir a shared mount, so changes of names appear in every mount namespace.
// Otherwise a copy of the mount elsewhere would keep a deleted namespace alive.
func prepareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		unlock, lerr := lockNames(dir)
		if lerr != nil {
			return lerr
		}
		defer unlock()
		if err = unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, ""); errors.Is(err, unix.EINVAL) {
			if err := unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return fmt.Errorf("bind %s on itself: %w", dir, err)
			}
			err = unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if errors.Is(err, unix.EPERM) && os.Geteuid() != 0 { // examples/weir-serve.service forbids mounts
		return fmt.Errorf("make %s a shared mount: %w: run weir apply as root, or systemctl reload weir", dir, err)
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", dir, err)
	}
	return nil
}

// lockNames takes the lock of iproute2 on the directory of names. Without it, two processes would stack two mounts. Any
// user can hold it for ever, so lockNames goes on without it after a second: two mounts do no harm.
func lockNames(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || time.Now().After(deadline) {
			return func() { d.Close() }, nil
		} else if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			d.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
	}
}

// Delete removes a name. The namespace exists as long as a process, a socket or a [Handle] holds
// it. For an unknown name the error wraps [os.ErrNotExist].
func Delete(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	path := filepath.Join(dirs[0], name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	// EINVAL: not a mount but a file left by a reboot or a crash. It is removed, too.
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("delete network namespace %q: unmount: %w", name, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("delete network namespace %q: %w", name, err)
	}
	return nil
}

// Names lists the named namespaces in alphabetical order, including leftover files without a
// namespace.
func Names() ([]string, error) {
	entries, err := os.ReadDir(dirs[0])
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // no name created since boot
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// LoopbackUp brings lo up in the calling thread's namespace. In a new namespace it is down, and not
// even 127.0.0.1 answers.
func LoopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	return nil
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > unix.NAME_MAX || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("network namespace %q: not a valid name; want one without slashes, as `ip netns list` shows it", name)
	}
	return nil
}
