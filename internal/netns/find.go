// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// ErrGone reports a network namespace without any process or name.
var ErrGone = errors.New("network namespace cannot be opened")

// Find opens a namespace: the caller's own, the one of ref (see [Open]), a named one, or the one of
// any process. It returns [ErrGone] if none matches. Another namespace with the same inode number
// does not match.
func Find(ref string, id ID) (*Handle, error) {
	ns, err := findInode(ref, id.Inode)
	if err != nil {
		return nil, err
	}
	if !ns.Is(id) {
		ns.Close()
		return nil, fmt.Errorf("%w: %s is the number of another namespace now", ErrGone, id)
	}
	return ns, nil
}

// findInode opens the namespace with an inode number.
func findInode(ref string, inode uint64) (*Handle, error) {
	if ns := openIf(inode, Current); ns != nil {
		return ns, nil
	}
	if ref != "" && numbered(ref) == 0 {
		if ns := openIf(inode, func() (*Handle, error) { return Open(ref) }); ns != nil {
			return ns, nil
		}
	}
	names, _ := Names()
	for _, n := range names {
		if ns := openIfAt(inode, filepath.Join(dirs[0], n), n); ns != nil {
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
		if ns := openIfInode(inode, pid); ns != nil {
			return ns, nil
		}
	}
	name := fmt.Sprintf("net:[%d]", inode)
	if ref != "" && ref != name {
		name = fmt.Sprintf("%s (%s)", ref, name)
	}
	return nil, fmt.Errorf("%w: %s: %s", ErrGone, name, whyGone(users.SeesAll()))
}

// RemedyGone is the remedy for instances in a deleted namespace. weir apply rejects a file with
// such a namespace.
const RemedyGone = "create it again or remove it from the file, then run weir apply"

// whyGone explains why a user finds no process in a namespace. all: the user sees all processes of
// its pid namespace.
func whyGone(all bool) string {
	if all {
		return "it has no process and no name here: it was probably deleted: " + RemedyGone
	}
	return "no process of it is visible to this user: run as root"
}

// numbered returns the inode number of a reference in the form of the links in /proc/PID/ns. It
// returns 0 for other forms.
func numbered(ref string) uint64 {
	text, ok := strings.CutPrefix(ref, "net:[")
	text, end := strings.CutSuffix(text, "]")
	inode, err := strconv.ParseUint(text, 10, 64)
	if !ok || !end || err != nil {
		return 0
	}
	return inode
}

// Reference returns a reference to a namespace: ref if it still matches, else its number. It
// returns [ErrGone] if the namespace cannot be found.
func Reference(ref string, id ID) (string, error) {
	if ns, err := Open(ref); err == nil {
		is := ns.Is(id)
		ns.Close()
		if is {
			return ref, nil
		}
	}
	ns, err := Find(ref, id)
	if err != nil {
		return "", err
	}
	ns.Close()
	return id.String(), nil
}

// OfScope opens the namespace of pins, like [Find]. scope is its inode number in decimal, cookie
// its cookie, 0 if unknown.
func OfScope(ref, scope string, cookie uint64) (*Handle, error) {
	inode, err := strconv.ParseUint(scope, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is not the number of a network namespace", scope)
	}
	return Find(ref, ID{inode, cookie})
}

// Gone reports whether the namespace of pins is gone (see [OfScope]). It returns false for a scope
// of another kind, and if this user cannot know.
func Gone(scope string, cookie uint64) bool {
	ns, err := OfScope("", scope, cookie)
	if err == nil {
		ns.Close()
	}
	return errors.Is(err, ErrGone) && users.SeesAll()
}

// openIfAt opens a file of nsfs if it has the inode number.
func openIfAt(inode uint64, path, name string) *Handle {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Ino != inode {
		return nil
	}
	return openIf(inode, func() (*Handle, error) { return openPath(path, name) })
}

// openIfInode opens a process's namespace if it has the inode number. It skips processes of users
// that block the kernel: see package bounded.
func openIfInode(inode uint64, pid int) *Handle {
	path := filepath.Join("/proc", strconv.Itoa(pid), "ns/net")
	ns, _ := bounded.DoLazy(func() string { return bounded.Process(pid) },
		func() (*Handle, error) { return openIfAt(inode, path, ""), nil },
		func(ns *Handle, _ error) {
			if ns != nil {
				ns.Close()
			}
		})
	return ns
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

// InNew runs f in a new network namespace. The namespace ends with f unless something still holds
// it. As in [Handle.Do], goroutines started by f do not run in it, and mounts are the caller's.
func InNew(f func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create a network namespace: %w (needs CAP_SYS_ADMIN)", err)
		}
		return f()
	})
}
