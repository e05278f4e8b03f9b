// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	osuser "os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/internal/sockdiag"
)

// ErrImpostor reports a process of another user answering at a socket.
var ErrImpostor = errors.New("another user answers there")

// CheckServer checks the user of the process at a Unix socket. It must be root, this process's
// user, the user number in the environment variable env ("" for no variable), or the owner of the
// path's directory. That owner controls the directory anyway. Anyone can bind an abstract name
// (@NAME) first, and it has no directory. names are further users, as in [CheckTCPServer].
func CheckServer(c net.Conn, path, env string, names ...string) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errors.ErrUnsupported
	}
	cred, err := Credentials(u)
	if err != nil {
		return fmt.Errorf("identify the server at %s: %w", path, err)
	}
	if trusted(cred.Uid, names) {
		return nil
	}
	remedy := ""
	if env != "" {
		if uid, err := strconv.ParseUint(os.Getenv(env), 10, 32); err == nil && uint32(uid) == cred.Uid {
			return nil
		}
		remedy = fmt.Sprintf(": set $%s to its number if that is right", env)
	}
	if path != "" && path[0] != '@' && path[0] != 0 {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Dir(path), &st); err == nil && st.Uid == cred.Uid {
			return nil
		}
	}
	return fmt.Errorf("%s: %w: user %d, neither root nor this user%s%s", path, ErrImpostor, cred.Uid, orNames(names), remedy)
}

// acceptTime is how long CheckTCPServer waits until the server has accepted. The kernel knows no
// user of the socket before.
const acceptTime = time.Second

// CheckTCPServer checks the server of a connection within this host, because any user can listen at
// a port from 1024 first. It must be root, this process's user or one of names. Unknown names are
// ignored. Servers on other hosts pass.
func CheckTCPServer(ctx context.Context, c *net.TCPConn, names ...string) error {
	here, there := c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
	if !there.Addr().Unmap().IsLoopback() && here.Addr().Unmap() != there.Addr().Unmap() {
		return nil
	}
	var diag sockdiag.Finder
	defer diag.Close()
	ctx, cancel := context.WithTimeout(ctx, acceptTime)
	defer cancel()
	for {
		s, err := diag.TCP(there, here)
		switch {
		case err != nil:
			return fmt.Errorf("find the user of the server at %s: %w", there, err)
		case s.Inode != 0 && trusted(s.UID, names):
			return nil
		case s.Inode != 0:
			return fmt.Errorf("%s: %w: user %s, neither root nor this user%s", there, ErrImpostor, userName(s.UID), orNames(names))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: the server does not accept the connection", there)
		case <-time.After(takeOverEvery):
		}
	}
}

func trusted(uid uint32, names []string) bool {
	return uid == 0 || int(uid) == os.Geteuid() || slices.ContainsFunc(names, func(name string) bool {
		u, err := osuser.Lookup(name)
		return err == nil && u.Uid == strconv.FormatUint(uint64(uid), 10)
	})
}

func orNames(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " nor " + strings.Join(names, " nor ")
}
