// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"net"
	"sync/atomic"
	"syscall"
)

// Scarce is a listener in a process without free descriptors at times.
type Scarce struct {
	net.Listener
	Fail atomic.Int32 // number of accepts to fail from now on
}

// Accept implements net.Listener.
func (s *Scarce) Accept() (net.Conn, error) {
	if s.Fail.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	return s.Listener.Accept()
}
