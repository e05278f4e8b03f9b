// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/users"
)

// unpinned are the sockets of a weir serve that goes by its file without pins: that of each feature which it runs can (--only), and its
// user may not pin. nil: it goes by the pins.
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

// mayPin reports whether this process has the right to load programs and pin them.
func mayPin() bool { return users.Has(unix.CAP_BPF) || users.Has(unix.CAP_SYS_ADMIN) }

// able says why no part of a file that is to be pinned can ever be in force. Reasons that may pass are for later attempts.
func (h *Host) able() error {
	if err := h.Root.Writable(); err != nil {
		return err
	}
	if !mayPin() {
		return fmt.Errorf("loading programs without CAP_BPF (before Linux 5.8 CAP_SYS_ADMIN): %w: run as root", os.ErrPermission)
	}
	return nil
}

// configured is a file as features read it; nil: there is none.
func configured(c *Config) *feature.Document {
	if c == nil {
		return &feature.Document{}
	}
	return c.Document()
}
