// SPDX-License-Identifier: Apache-2.0

package peer

import "fmt"

// These limits bound a frame's body by type. They are checked before the body is read, so a
// certificate alone cannot fill memory.
const (
	maxHello    = 13 + 255
	maxRegister = 64 << 10
	maxControl  = 1 << 20 // of peers and flows
	loadSize    = 8
)

// TakeSessions accepts sessions on this connection: move frames of up to 128 MiB. Otherwise a move
// frame must have no session. Call it only if the other side may move sessions here.
func (c *Conn) TakeSessions() { c.sessions.Store(true) }

// helloLimit is the limit of the first frame.
func helloLimit(kind byte) (int, error) {
	if kind != typeHello {
		return 0, fmt.Errorf("%w: type %d in place of a hello", ErrFormat, kind)
	}
	return maxHello, nil
}

// limit is the limit of the frames after the hello.
func (c *Conn) limit(kind byte) (int, error) {
	switch kind {
	case typeMove:
		if c.sessions.Load() {
			return maxFrame - 1, nil
		}
		return moveSize, nil
	case typeRegister:
		return maxRegister, nil
	case typePeers, typeFlows:
		return maxControl, nil
	case typeLoad:
		return loadSize, nil
	case typePing, typePong:
		return 0, nil
	}
	return 0, fmt.Errorf("%w: type %d", ErrFormat, kind)
}
