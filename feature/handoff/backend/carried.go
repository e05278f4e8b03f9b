// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// carried is the application's part of a session, without the kernel's.
type carried struct {
	Name   string // of its former member
	Label  string // of the session's listener
	State  []byte // nil: nothing committed yet
	Unread []byte // taken from the receive queue, not included in State
	Replay uint64 // bytes written after State: the application writes them again, and they are dropped
}

// Versions: the first byte of a session between agents, and of the state kept by a keeper.
const (
	carriedVersion = 1
	keptVersion    = 1
)

var errCarried = errors.New("not a session encoded by a weir agent")

// append appends version, replay, name, label, state, unread, and the kernel's state (repair.State). Lengths have 4
// bytes. Numbers are in network byte order.
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
		return c, nil, fmt.Errorf("%w: version %d, want %d: update weir on this host first", errCarried, v, carriedVersion)
	}
	c.Replay = r.uint64()
	c.Name, c.Label = string(r.field()), string(r.field())
	c.State, c.Unread = r.field(), r.field()
	if r.short {
		return c, nil, fmt.Errorf("%w: it is truncated", errCarried)
	}
	return c, r.b, nil
}

// kept is the agent's state of a moving session. The keeper has it in place of the application's state. The agent's
// successor continues from it.
type kept struct {
	Receiving bool
	Epoch     move.Epoch   // of the move
	Other     move.Backend // destination or source
	ReuseAddr bool         // when sending: repair mode overwrites it
	Nonce     move.Nonce   // when sending: the nonce at the move's start
	Put       uint64       // when receiving: the write position before Kernel's unsent bytes are sent
	Carried   carried      // without Unread, which the keeper has
	Kernel    []byte       // when receiving: repair.State with only the unsent bytes in the send queue
}

func (k *kept) append(b []byte) []byte {
	b = append(append(b, wire.MoveMagic...), keptVersion, bit(k.Receiving), bit(k.ReuseAddr))
	b = binary.BigEndian.AppendUint32(b, uint32(k.Epoch))
	b = binary.BigEndian.AppendUint16(b, uint16(k.Other))
	if k.Receiving {
		b = binary.BigEndian.AppendUint64(b, k.Put)
	} else { // at the same offset: agents without nonces do not read it
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
		return k, fmt.Errorf("%w: kept in version %d, want %d", errCarried, v, keptVersion)
	}
	k.Receiving, k.ReuseAddr = r.byte() == 1, r.byte() == 1
	k.Epoch, k.Other = move.Epoch(r.uint32()), move.Backend(r.uint16())
	if put := r.uint64(); k.Receiving {
		k.Put = put
	} else {
		k.Nonce = move.Nonce(put)
	}
	if r.short {
		return k, fmt.Errorf("%w: it is truncated", errCarried)
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

// reader parses fields. short means the data ended early.
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
