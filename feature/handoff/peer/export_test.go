// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"log/slog"
	"net"
)

// Raw returns the socket below TLS.
func Raw(c *Conn) *net.TCPConn { return c.tcp() }

// Reload runs one check of [Identity.Watch].
func (i *Identity) Reload(name string, log *slog.Logger) { i.reload(name, log) }
