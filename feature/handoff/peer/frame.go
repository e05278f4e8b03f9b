// SPDX-License-Identifier: Apache-2.0

// Package peer is how agents of backends and load balancers speak with each other: frames over TLS, in which both sides have shown a
// certificate (mutual TLS 1.3, keys by file). What they say about sessions is package move's.
//
// # Wire format, version 1
//
// Numbers are in network byte order. Each side first sends a Hello, then frames in any order:
//
//	0   4  length of what follows
//	4   1  type: 1 hello, 2 move, 3 register, 4 peers, 5 ping, 6 pong, 7 flows (see flows.go), 9 load
//	5  ..  the body; see limit.go for how long it may be
//
//	hello: 0  1  version: 1
//	       1  1  role: 0 backend, 1 load balancer
//	       2  2  number of the backend, 0 of a load balancer
//	       4  8  instance: of this life of the agent, never the same again
//	      12  1  length of the name, and the name
//
//	move:  0  1  kind of message (move.Kind)
//	       1  1  from, and to: move.Role, 4 bits each
//	       2  1  1: OK; of Hold: packets wait at the source, and are not to be held
//	       3  1  0
//	       4  4  epoch
//	       8  4  of Reclaimed and Revoked the move that the answer is about; of Known, Flipped and Reclaim the birth of the lb
//	             end's record, or 0
//	      12  2  backend: of Hold and Left where the session goes, or has gone
//	      14  2  service: its number in the lower 6 bits; above them which of its addresses, 0 where only one can be meant
//	      16 16  the client's address, IPv4 as ::ffff:a.b.c.d
//	      32  2  the client's port
//	      34  2  0
//	      36  8  instance of the destination's agent that is meant, or 0
//	      44 ..  of State: the session, as the backends' agents have it
//
//	load:  0  2  service
//	       2  2  1: there is no member of it that could go on with a session
//	       4  4  what waits there
package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature/handoff/move"
)

// version is that of the wire format.
const version = 1

// maxFrame is the most bytes of a frame: a session's queues, and what its application says.
const maxFrame = 128 << 20

// ErrFormat says that what came is no frame.
var ErrFormat = errors.New("not a frame of weir's agents")

const (
	typeHello    = 1
	typeMove     = 2
	typeRegister = 3
	typePeers    = 4
	typePing     = 5
	typePong     = 6
	typeFlows    = 7
	typeLoad     = 9
	moveSize     = 44
)

// Role is what an agent is an agent of.
type Role uint8

// The roles.
const (
	BackendAgent Role = iota
	LBAgent
)

// Hello is how an agent introduces itself.
type Hello struct {
	Role     Role
	Number   move.Backend // of a backend
	Instance uint64       // of this life of the agent
	Name     string       // at most 255 bytes

	// Beside is what Dial says next, to a load balancer. It is no part of the hello.
	Beside *Beside
}

// Beside is a backend's registration, and what it does with what the load balancer tells of others.
type Beside struct {
	Register Registration
	Peers    func(Peers)
}

// Flow is a session as load balancers know it. A service may have several addresses, at each of which a client may have a connection from
// one port: Service then says which. See [ServiceNumber].
type Flow struct {
	Service uint16
	Client  netip.AddrPort
}

// serviceBits are those of a service's number. The bits above them tell its addresses apart.
const serviceBits = 6

// ServiceNumber is the number of the service that a flow's Service names.
func ServiceNumber(flows uint16) uint16 { return flows & (1<<serviceBits - 1) }

// MaxTag is the highest tag of a service's address.
const MaxTag = 1<<(16-serviceBits) - 1

// FlowService is the Service of flows to one address of a service. tag is 0 where no other address can be meant.
func FlowService(number, tag uint16) uint16 { return number | tag<<serviceBits }

func (f Flow) String() string { return fmt.Sprintf("%s of service %d", f.Client, f.Service) }

// Frame is a message about a flow.
type Frame struct {
	Message  move.Message
	Flow     Flow
	Instance uint64 // of the destination's agent
	Session  []byte // of State
	// IsLoad says that it is none of these, but what waits at the backend for Flow.Service: Load.
	IsLoad bool
	Load   uint32
	None   bool // no member is there
}

func (h Hello) append(b []byte) ([]byte, error) {
	if len(h.Name) > 255 {
		return nil, fmt.Errorf("the name %q has more than 255 bytes", h.Name)
	}
	b = append(b, version, byte(h.Role))
	b = binary.BigEndian.AppendUint16(b, uint16(h.Number))
	b = binary.BigEndian.AppendUint64(b, h.Instance)
	return append(append(b, byte(len(h.Name))), h.Name...), nil
}

func parseHello(b []byte) (h Hello, err error) {
	switch {
	case len(b) > 0 && b[0] != version:
		return h, fmt.Errorf("%w: version %d, and this weir speaks %d: update the older one", ErrFormat, b[0], version)
	case len(b) < 13 || len(b) != 13+int(b[12]):
		return h, fmt.Errorf("%w: a hello of %d bytes", ErrFormat, len(b))
	case b[1] > byte(LBAgent):
		return h, fmt.Errorf("%w: role %d", ErrFormat, b[1])
	}
	return Hello{Role: Role(b[1]), Number: move.Backend(binary.BigEndian.Uint16(b[2:])), Instance: binary.BigEndian.Uint64(b[4:]), Name: string(b[13:])}, nil
}

func (f Frame) appendHeader(b []byte) []byte {
	m := f.Message
	ok := byte(0)
	if m.OK {
		ok = 1
	}
	b = append(b, byte(m.Kind), byte(m.From)<<4|byte(m.To), ok, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(m.Epoch))
	about := uint32(m.Move)
	if carriesNonce(m.Kind) {
		about = uint32(m.Nonce)
	}
	b = binary.BigEndian.AppendUint32(b, about)
	b = binary.BigEndian.AppendUint16(b, uint16(m.Backend))
	b = binary.BigEndian.AppendUint16(b, f.Flow.Service)
	a := f.Flow.Client.Addr().As16()
	b = append(b, a[:]...)
	b = binary.BigEndian.AppendUint16(b, f.Flow.Client.Port())
	b = append(b, 0, 0)
	return binary.BigEndian.AppendUint64(b, f.Instance)
}

// carriesNonce says which meaning a message's third word has: agents that know of no births leave it 0.
func carriesNonce(k move.Kind) bool { return k == move.Known || k == move.Flipped || k == move.Reclaim }

func parseFrame(b []byte) (f Frame, err error) {
	if len(b) < moveSize {
		return f, fmt.Errorf("%w: a message of %d bytes", ErrFormat, len(b))
	}
	m := move.Message{Kind: move.Kind(b[0]), From: move.Role(b[1] >> 4), To: move.Role(b[1] & 15), OK: b[2] == 1,
		Epoch: move.Epoch(binary.BigEndian.Uint32(b[4:])), Backend: move.Backend(binary.BigEndian.Uint16(b[12:]))}
	if about := binary.BigEndian.Uint32(b[8:]); carriesNonce(m.Kind) {
		m.Nonce = move.Nonce(about)
	} else {
		m.Move = move.Epoch(about)
	}
	if m.Kind < move.Buffer || m.Kind > move.Left || m.From > move.AtDestination || m.To > move.AtDestination || b[2] > 1 {
		return f, fmt.Errorf("%w: %v", ErrFormat, b[:4])
	}
	if m.Kind != move.State && len(b) != moveSize {
		return f, fmt.Errorf("%w: %s with %d bytes behind it", ErrFormat, m.Kind, len(b)-moveSize)
	}
	client := netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[16:])).Unmap(), binary.BigEndian.Uint16(b[32:]))
	return Frame{Message: m, Flow: Flow{binary.BigEndian.Uint16(b[14:]), client}, Instance: binary.BigEndian.Uint64(b[36:]), Session: b[moveSize:]}, nil
}
