// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ID names one network namespace for as long as the host is up. The kernel gives the inode number of a deleted namespace
// to a later one, which has another cookie.
type ID struct {
	Inode  uint64 `json:"inode"`
	Cookie uint64 `json:"cookie,omitempty"` // 0: unknown, before Linux 5.14; the inode number decides then
}

// ID returns the namespace's.
func (h *Handle) ID() ID {
	cookie, _ := h.Cookie() // 0 where the kernel has none
	return ID{h.ino, cookie}
}

// Is tells whether the handle is of the namespace with that ID.
func (h *Handle) Is(id ID) bool {
	return h.ino == id.Inode && (id.Cookie == 0 || id.Same(h.ID()))
}

// Same tells whether both are of one namespace, as far as cookies are known.
func (id ID) Same(o ID) bool {
	return id.Inode == o.Inode && (id.Cookie == o.Cookie || id.Cookie == 0 || o.Cookie == 0)
}

// String is "net:[4026531840]", as in /proc/PID/ns.
func (id ID) String() string { return fmt.Sprintf("net:[%d]", id.Inode) }

// Cookie is the namespace's number that the kernel never gives twice during one
// boot: the SO_NETNS_COOKIE of a socket inside (Linux 5.14), equal to what
// bpf_get_netns_cookie returns. On older kernels the error wraps
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
			return fmt.Errorf("make a socket: %w", err)
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

// file is a file of nsfs. Its change time is when the kernel made it, so a later namespace of the number has another one.
type file struct {
	dev, ino uint64
	born     unix.Timespec
}

func (h *Handle) file() file { return file{h.dev, h.ino, h.born} }

// cookieAge is how old a file is whose cookie is kept: two namespaces of one number cannot seem equally old then.
const cookieAge = time.Second

// maxCookies bounds the cache. A file of nsfs that nothing holds open or mounted is made anew each time.
const maxCookies = 4096

// cookieCache spares a thread inside the namespace for each question.
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
