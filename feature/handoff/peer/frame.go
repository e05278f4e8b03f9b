// SPDX-License-Identifier: Apache-2.0

// Package peer is the protocol between the agents of backends and load balancers: frames over
// mutual TLS 1.3, with certificates from files. Package move defines the messages about sessions.
//
// # Wire format, version 1
//
// Numbers are in network byte order. Each side first sends a hello, then frames in any order:
//
//	0   4  length of the rest
//	4   1  type: 1 hello, 2 move, 3 register, 4 peers, 5 ping, 6 pong, 7 flows (see flows.go), 9 load
//	5  ..  the body; see limit.go for its longest length
//
//	hello: 0  1  version: 1
//	       1  1  role: 0 backend, 1 load balancer
//	       2  2  number of the backend, 0 of a load balancer
//	       4  8  instance: differs for each run of the agent
//	      12  1  length of the name, and the name
//
//	move:  0  1  kind of message (move.Kind)
//	       1  1  from, and to: move.Role, 4 bits each
//	       2  1  1: OK; of Buffer: packets wait at the source, and not at the load balancer
//	       3  1  0
//	       4  4  epoch
//	       8  4  of Reclaimed and Revoked: the answered move; of Known, Flipped and Reclaim: the nonce of the
//	             load balancer's record, or 0
//	      12  2  backend: of Buffer and Left, the session's destination
//	      14  2  service: its number in the lower 6 bits; above them the tag of its address, 0 if only one is possible
//	      16 16  the client's address, IPv4 as ::ffff:a.b.c.d
//	      32  2  the client's port
//	      34  2  0
//	      36  8  instance of the destination's agent, or 0
//	      44 ..  of State: the session, in the backends' agents' own form
//
//	load:  0  2  service
//	       2  2  1: no member there could continue a session
//	       4  4  load
package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature/handoff/move"
)

// version is the version of the wire format.
const version = 1

// maxFrame is the largest frame in bytes: a session's queues and its application's state.
const maxFrame = 128 << 20

// ErrFormat reports malformed input.
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

// Role is the kind of an agent.
type Role uint8

// These are the roles.
const (
	BackendAgent Role = iota
	LBAgent
)

// Hello is the introduction of an agent.
type Hello struct {
	Role     Role
	Number   move.Backend // of a backend
	Instance uint64       // of this run of the agent
	Name     string       // at most 255 bytes

	// Beside is the message of Dial to a load balancer after the hello. It is no part of the hello.
	Beside *Beside
}

// Beside is a backend's registration, and its handler of the load balancer's reports.
type Beside struct {
	Register Registration
	Peers    func(Peers)
}

// Flow is the identity of a session at load balancers. A client may have connections from one port
// to several addresses of a service. Service then includes the tag of the address. See
// [ServiceNumber].
type Flow struct {
	Service uint16
	Client  netip.AddrPort
}

// serviceBits is the width of a service's number. The bits above it are the tag of the address.
const serviceBits = 6

// ServiceNumber returns the service's number from a flow's Service.
func ServiceNumber(flows uint16) uint16 { return flows & (1<<serviceBits - 1) }

// MaxTag is the highest tag of a service's address.
const MaxTag = 1<<(16-serviceBits) - 1

// FlowService returns the Service of flows to one address of a service. tag is 0 if no other
// address is possible.
func FlowService(number, tag uint16) uint16 { return number | tag<<serviceBits }

func (f Flow) String() string { return fmt.Sprintf("%s of service %d", f.Client, f.Service) }

// Frame is a message about a flow, or a load.
type Frame struct {
	Message  move.Message
	Flow     Flow
	Instance uint64 // of the destination's agent
	Session  []byte // of State
	// IsLoad marks a load frame. Load is the backend's load for Flow.Service. Message and Session
	// are empty.
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

// carriesNonce reports whether a message's third word is a nonce. Agents without nonces leave it 0.
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
		return f, fmt.Errorf("%w: %s with %d extra bytes", ErrFormat, m.Kind, len(b)-moveSize)
	}
	client := netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[16:])).Unmap(), binary.BigEndian.Uint16(b[32:]))
	return Frame{Message: m, Flow: Flow{binary.BigEndian.Uint16(b[14:]), client}, Instance: binary.BigEndian.Uint64(b[36:]), Session: b[moveSize:]}, nil
}
