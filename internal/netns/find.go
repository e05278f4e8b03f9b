// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrGone says that no process and no name leads to a network namespace.
var ErrGone = errors.New("network namespace cannot be opened")

// Find opens the namespace with an inode number: the caller's own, the one that
// ref leads to (see [Open]), that of a name, or that of any process. It returns
// [ErrGone] where none of them is it.
func Find(ref string, inode uint64) (*Handle, error) {
	if ns := openIf(inode, Current); ns != nil {
		return ns, nil
	}
	if ns := openIf(inode, func() (*Handle, error) { return Open(ref) }); ns != nil {
		return ns, nil
	}
	names, _ := Names()
	for _, n := range names {
		if ns := openIf(inode, func() (*Handle, error) { return Open(n) }); ns != nil {
			return ns, nil
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if ns := openIf(inode, func() (*Handle, error) { return OfPID(pid) }); ns != nil {
			return ns, nil
		}
	}
	return nil, fmt.Errorf("%w: %s (net:[%d]) belongs to no process that this user can see; run as root", ErrGone, ref, inode)
}

// numbered is the inode number in a reference as the links below /proc/PID/ns show it, 0 if ref is none.
func numbered(ref string) uint64 {
	text, ok := strings.CutPrefix(ref, "net:[")
	text, end := strings.CutSuffix(text, "]")
	inode, err := strconv.ParseUint(text, 10, 64)
	if !ok || !end || err != nil {
		return 0
	}
	return inode
}

// Reference returns a reference that leads to the namespace with an inode number: ref where it still does, else the
// number. It returns [ErrGone] where nothing leads there.
func Reference(ref string, inode uint64) (string, error) {
	if ns := openIf(inode, func() (*Handle, error) { return Open(ref) }); ns != nil {
		ns.Close()
		return ref, nil
	}
	ns, err := Find(ref, inode)
	if err != nil {
		return "", err
	}
	ns.Close()
	return fmt.Sprintf("net:[%d]", inode), nil
}

// OfScope opens the namespace of pins: scope is its inode number in decimal. The errors are those of [Find].
func OfScope(scope string) (*Handle, error) {
	inode, err := strconv.ParseUint(scope, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is no network namespace's number", scope)
	}
	return Find("", inode)
}

func openIf(inode uint64, open func() (*Handle, error)) *Handle {
	ns, err := open()
	if err != nil {
		return nil
	}
	if ns.Inode() != inode {
		ns.Close()
		return nil
	}
	return ns
}

// InNew runs f in a network namespace of its own, which ends with f unless f
// leaves something that holds it. As in [Handle.Do], goroutines that f starts do
// not run in it, and mounts are the caller's.
func InNew(f func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w (needs CAP_SYS_ADMIN)", err)
		}
		return f()
	})
}
