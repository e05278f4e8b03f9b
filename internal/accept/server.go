// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// ErrImpostor says that another user's process answers at a socket.
var ErrImpostor = errors.New("another user answers there")

// CheckServer checks who answers at a Unix socket. It must be root, this process's
// user, the user of the environment variable env (a number; "" for no variable), or
// the owner of the path's directory, who can put there what he likes. Everybody can
// take an abstract name (@NAME) first, and it has no directory.
func CheckServer(c net.Conn, path, env string) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errors.ErrUnsupported
	}
	cred, err := Credentials(u)
	if err != nil {
		return fmt.Errorf("asking who answers at %s: %w", path, err)
	}
	if cred.Uid == 0 || int(cred.Uid) == os.Geteuid() {
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
	return fmt.Errorf("%s: %w: user %d, neither root nor this user%s", path, ErrImpostor, cred.Uid, remedy)
}
