// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ID identifies a network namespace until the next boot. The kernel reuses the inode numbers of
// deleted namespaces, but not their cookies.
type ID struct {
	Inode  uint64 `json:"inode"`
	Cookie uint64 `json:"cookie,omitempty"` // 0: unknown, before Linux 5.14; then only the inode number counts
}

// ID returns the namespace's ID.
func (h *Handle) ID() ID {
	cookie, _ := h.Cookie() // 0 if the kernel has none
	return ID{h.ino, cookie}
}

// Is reports whether the handle's namespace has the ID.
func (h *Handle) Is(id ID) bool {
	return h.ino == id.Inode && (id.Cookie == 0 || id.Same(h.ID()))
}

// Same reports whether both identify one namespace, as far as cookies are known.
func (id ID) Same(o ID) bool {
	return id.Inode == o.Inode && (id.Cookie == o.Cookie || id.Cookie == 0 || o.Cookie == 0)
}

// String returns "net:[4026531840]", as in /proc/PID/ns.
func (id ID) String() string { return fmt.Sprintf("net:[%d]", id.Inode) }

// Cookie returns a number of the namespace, unique during one boot: the SO_NETNS_COOKIE of a socket
// inside (Linux 5.14). bpf_get_netns_cookie returns the same. On older kernels the error wraps
// [errors.ErrUnsupported].
func (h *Handle) Cookie() (uint64, error) {
	if cookie, known := cookies.get(h.file()); known {
		return cookie, nil
	}
	cookie, err := h.askCookie()
	if err != nil {
		return 0, fmt.Errorf("cookie of %s: %w", h, err)
	}
	if time.Since(time.Unix(h.born.Unix())) > cookieAge {
		cookies.put(h.file(), cookie)
	}
	return cookie, nil
}

func (h *Handle) askCookie() (cookie uint64, err error) {
	err = h.Do(func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("create a socket: %w", err)
		}
		defer unix.Close(s)
		cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		if errors.Is(err, unix.ENOPROTOOPT) {
			return fmt.Errorf("SO_NETNS_COOKIE needs Linux 5.14: %w", errors.ErrUnsupported)
		}
		return err
	})
	return cookie, err
}

// file is a file of nsfs. Its change time is its creation by the kernel, so a later namespace with
// the same number differs.
type file struct {
	dev, ino uint64
	born     unix.Timespec
}

func (h *Handle) file() file { return file{h.dev, h.ino, h.born} }

// cookieAge is the minimum age of a file with a cached cookie. Two namespaces with one number
// cannot seem equally old then.
const cookieAge = time.Second

// maxCookies bounds the cache. An nsfs file neither open nor mounted is created anew each time.
const maxCookies = 4096

// cookieCache saves a thread inside the namespace per query.
type cookieCache struct {
	mu    sync.Mutex
	known map[file]uint64
}

var cookies = cookieCache{known: map[file]uint64{}}

func (c *cookieCache) get(f file) (cookie uint64, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cookie, known = c.known[f]
	return cookie, known
}

func (c *cookieCache) put(f file, cookie uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) >= maxCookies {
		clear(c.known)
	}
	c.known[f] = cookie
}
