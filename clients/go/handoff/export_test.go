// SPDX-License-Identifier: Apache-2.0

package handoff

import "net"

// Accepting simulates a connection being accepted, until done is called with it.
func (l *Listener) Accepting() (done func(c *net.TCPConn)) {
	l.running.Add(1)
	return func(c *net.TCPConn) {
		defer l.running.Done()
		l.addSession(c)
	}
}
