// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/users"
)

// unpinned returns the sockets of a weir serve that uses its file without pins. Its user may not pin, and each of its
// features (--only) has such a socket. nil: it uses the pins.
func unpinned(o ServeOptions, sockets map[string]feature.Socket) (out []feature.FileSocket) {
	if len(o.Only) == 0 || mayPin() {
		return nil
	}
	for _, name := range o.Only {
		x, ok := sockets[name].(feature.FileSocket)
		if !ok {
			return nil
		}
		out = append(out, x)
	}
	return out
}

// mayPin reports whether this process may load programs and pin them.
func mayPin() bool { return users.Has(unix.CAP_BPF) || users.Has(unix.CAP_SYS_ADMIN) }

// able returns an error if no pinned part of a file can ever take effect. Temporary causes are left to later attempts.
func (h *Host) able() error {
	if err := h.Root.Writable(); err != nil {
		return err
	}
	if !mayPin() {
		return fmt.Errorf("load programs without CAP_BPF (before Linux 5.8 CAP_SYS_ADMIN): %w: run as root", os.ErrPermission)
	}
	return nil
}

// configured returns a file as read by features. A nil file is empty.
func configured(c *Config) *feature.Document {
	if c == nil {
		return &feature.Document{}
	}
	return c.Document()
}
