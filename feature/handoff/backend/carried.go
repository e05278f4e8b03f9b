// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// carried is a session but for the kernel's part of it: what its application has said of it.
type carried struct {
	Name   string // of the member that has had it
	Label  string // of the listener that it came by
	State  []byte // nil: nothing was committed yet
	Unread []byte // out of the receive queue, and not accounted for by State
	Replay uint64 // bytes that were written after State: they will be written again, and dropped then
}

// The first byte of what travels from agent to agent, and of what an agent has its keeper keep.
const (
	carriedVersion = 1
	keptVersion    = 1
)

var errCarried = errors.New("not a session of weir's agents")

// append has, one behind the other, version, replay, name, label, state, unread, and what the kernel
// knows (repair.State). All lengths are 4 bytes; numbers are in network byte order.
func (c *carried) append(b, kernelState []byte) []byte {
	b = append(b, carriedVersion)
	b = binary.BigEndian.AppendUint64(b, c.Replay)
	b = field(b, []byte(c.Name))
	b = field(b, []byte(c.Label))
	b = field(b, c.State)
	b = field(b, c.Unread)
	return append(b, kernelState...)
}

func parseCarried(b []byte) (c carried, kernelState []byte, err error) {
	r := reader{b: b}
	if v := r.byte(); v != carriedVersion && !r.short {
		return c, nil, fmt.Errorf("%w: version %d, and this weir reads %d: update weir here first", errCarried, v, carriedVersion)
	}
	c.Replay = r.uint64()
	c.Name, c.Label = string(r.field()), string(r.field())
	c.State, c.Unread = r.field(), r.field()
	if r.short {
		return c, nil, fmt.Errorf("%w: it is cut off", errCarried)
	}
	return c, r.b, nil
}

// kept is what an agent has the keeper keep of a session while it moves, in place of the application's state: whoever comes
// after the agent goes on from here.
type kept struct {
	Receiving bool
	Epoch     move.Epoch   // of the move
	Other     move.Backend // where it goes, or came from
	ReuseAddr bool         // of a session being sent: repair overwrites it
	Nonce     move.Nonce   // of a session being sent: that the move began with
	Put       uint64       // of a session being received: the position before the unsent bytes of Kernel are sent
	Carried   carried      // Unread is the keeper's own
	Kernel    []byte       // of a session being received: repair.State, of which only what is unsent is in the queue
}

func (k *kept) append(b []byte) []byte {
	b = append(append(b, wire.MoveMagic...), keptVersion, bit(k.Receiving), bit(k.ReuseAddr))
	b = binary.BigEndian.AppendUint32(b, uint32(k.Epoch))
	b = binary.BigEndian.AppendUint16(b, uint16(k.Other))
	if k.Receiving {
		b = binary.BigEndian.AppendUint64(b, k.Put)
	} else { // in its place: agents that know of no births do not look there
		b = binary.BigEndian.AppendUint64(b, uint64(k.Nonce))
	}
	return k.Carried.append(b, k.Kernel)
}

func parseKept(b []byte) (k kept, err error) {
	if !wire.Moving(b) {
		return k, errCarried
	}
	r := reader{b: b[len(wire.MoveMagic):]}
	if v := r.byte(); v != keptVersion && !r.short {
		return k, fmt.Errorf("%w: it was kept in version %d, and this weir reads %d", errCarried, v, keptVersion)
	}
	k.Receiving, k.ReuseAddr = r.byte() == 1, r.byte() == 1
	k.Epoch, k.Other = move.Epoch(r.uint32()), move.Backend(r.uint16())
	if put := r.uint64(); k.Receiving {
		k.Put = put
	} else {
		k.Nonce = move.Nonce(put)
	}
	if r.short {
		return k, fmt.Errorf("%w: it is cut off", errCarried)
	}
	k.Carried, k.Kernel, err = parseCarried(r.b)
	return k, err
}

func bit(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func field(b, v []byte) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(v))), v...)
}

// reader takes apart; short says that there was less than was asked for.
type reader struct {
	b     []byte
	short bool
}

func (r *reader) next(n int) []byte {
	if r.short || n < 0 || n > len(r.b) {
		r.short = true
		return make([]byte, min(max(n, 0), 8))
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) byte() byte     { return r.next(1)[0] }
func (r *reader) uint16() uint16 { return binary.BigEndian.Uint16(r.next(2)) }
func (r *reader) uint32() uint32 { return binary.BigEndian.Uint32(r.next(4)) }
func (r *reader) uint64() uint64 { return binary.BigEndian.Uint64(r.next(8)) }

func (r *reader) field() []byte {
	n := r.uint32()
	switch {
	case n == 0:
		return nil
	case uint64(n) > uint64(len(r.b)):
		r.short = true
		return nil
	}
	return r.next(int(n))
}
