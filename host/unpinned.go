// SPDX-License-Identifier: Apache-2.0

package host

import (
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/users"
)

// unpinned are the sockets of a weir serve that goes by its file without pins: that of each feature which it runs can (--only), and its
// user may not pin. nil: it goes by the pins.
func unpinned(o ServeOptions, sockets map[string]feature.Socket) (out []feature.FileSocket) {
	if len(o.Only) == 0 || users.Has(unix.CAP_BPF) || users.Has(unix.CAP_SYS_ADMIN) {
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

// configured is a file as features read it; nil: there is none.
func configured(c *Config) *feature.Document {
	if c == nil {
		return &feature.Document{}
	}
	return c.Document()
}
