// SPDX-License-Identifier: Apache-2.0

package peer

import "net"

// Raw is what is below TLS.
func Raw(c *Conn) *net.TCPConn { return c.tcp() }
