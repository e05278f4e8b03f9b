// SPDX-License-Identifier: Apache-2.0

package handoff

import "net"

// Accepting has the listener be in the midst of accepting a connection, until done is called with it.
func (l *Listener) Accepting() (done func(c *net.TCPConn)) {
	l.running.Add(1)
	return func(c *net.TCPConn) {
		defer l.running.Done()
		l.addSession(c)
	}
}
