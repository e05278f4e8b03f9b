// SPDX-License-Identifier: Apache-2.0

// Package flow translates the records of flows in the load balancer's maps.
package flow

import (
	"encoding/binary"
	"net/netip"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/ring"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/jhash"
)

// Key is a flow of a service, as the client's packets have it.
type Key struct {
	Client  netip.AddrPort // the port is 0 where the service is by source
	Service int            // its number, and above that the tag of the address: see lb.Service.Tag
}

// Flow is what the load balancer knows of one.
type Flow struct {
	move.Flow
	Buffered    bool         // packets to the owner go to the device of buffered packets
	Seen        uint64       // CLOCK_MONOTONIC in ns: the latest packet
	In, Out     uint64       // packets
	Ended       bool         // a reset, or the ends of both sides, have been seen
	BothEnds    bool         // the latter
	Reset       bool         // by its owner, and the client has said nothing since
	ClientReset bool         // by its client's reset alone: anybody can make one up
	Opening     bool         // a SYN made it known, or its owner has reset it, and its owner has said nothing since that only a session says
	Midway      bool         // a segment that opens nothing made it known, and its owner has said nothing that only a session says
	Unanswered  bool         // nothing but SYNs of the client and resets of its owner have come since it was opened
	Balanced    bool         // by the data path, which has chosen the epoch
	Told        bool         // by Learn or Override, and nothing of it was seen then
	Reported    bool         // a backend has made it known by its word
	Named       bool         // its owner's agent has told of the session, since the owner's latest answer to a SYN
	Reporter    move.Backend // that backend; 0: it is not known
	Unasked     bool         // packets of its owner made it known, and neither its client nor the owner's agent has confirmed it
	Pinned      bool         // by Override: it stays until Release
	Until       uint64       // CLOCK_MONOTONIC in ns: packets to the owner wait no longer than that, or when it moved
	Incarnation uint64       // instance of the owner's agent that had it flipped to the owner; 0: none has
}

// The word of a flow, see lb.h.
const (
	backendBits  = 10
	backendMask  = 1<<backendBits - 1
	ToAt         = backendBits
	BeforeAt     = 2 * backendBits
	BufferingBit = 1 << 30
	BufferedBit  = 1 << 31
	EpochAt      = 32
)

// The flags of a flow, see lb.h.
const (
	FinIn      = 1
	FinOut     = 2
	WasReset   = 4
	Told       = 8
	Pinned     = 16
	Opening    = 32
	Reported   = 64
	NoAnswer   = 128
	ResetOut   = 256
	Balanced   = 512
	OwnerReset = 1024
	Named      = 2048
	Midway     = 4096
	Unasked    = 8192
	ReporterAt = 16 // the backend
)

// Word packs the owners of a flow. buffered: packets to the owner wait.
func Word(f move.Flow, buffered bool) uint64 {
	w := uint64(f.Owner) | uint64(f.To)<<ToAt | uint64(f.Predecessor)<<BeforeAt | uint64(f.Epoch)<<EpochAt
	if f.Buffering {
		w |= BufferingBit
	}
	if buffered {
		w |= BufferedBit
	}
	return w
}

// Unword unpacks them.
func Unword(w uint64) (f move.Flow, buffered bool) {
	return move.Flow{Owner: move.Backend(w & backendMask), To: move.Backend(w >> ToAt & backendMask), Predecessor: move.Backend(w >> BeforeAt & backendMask),
		Buffering: w&BufferingBit != 0, Epoch: move.Epoch(w >> EpochAt)}, w&BufferedBit != 0
}

// Raw points to the data path's form: package ebpf takes what a pointer leads to as it is, and reflects on a value.
func (k Key) Raw() *bpf.LBLbFlowKey {
	return &bpf.LBLbFlowKey{Client: k.Client.Addr().As16(), Port: Swap(k.Client.Port()), Service: uint16(k.Service)}
}

// ParseKey reads the data path's form.
func ParseKey(r bpf.LBLbFlowKey) Key {
	return Key{Client: netip.AddrPortFrom(netip.AddrFrom16(r.Client).Unmap(), Swap(r.Port)), Service: int(r.Service)}
}

// Bucket is where a flow is in its service's ring, as the data path finds it.
func (k Key) Bucket() int {
	return int(jhash.Addr(uint32(Swap(k.Client.Port())), k.Client.Addr()) % ring.Buckets)
}

// Swap turns a port into network byte order, or back.
func Swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// Parse reads the data path's form.
func Parse(v bpf.LBLbFlow) Flow {
	out := Flow{Seen: v.Seen, In: v.In, Out: v.Out, BothEnds: v.Flags&(FinIn|FinOut) == FinIn|FinOut, Reset: v.Flags&ResetOut != 0,
		Opening: v.Flags&Opening != 0, Midway: v.Flags&Midway != 0, Unanswered: v.Flags&NoAnswer != 0, Balanced: v.Flags&Balanced != 0, Told: v.Flags&Told != 0, Reported: v.Flags&Reported != 0, Named: v.Flags&Named != 0, Unasked: v.Flags&Unasked != 0, Pinned: v.Flags&Pinned != 0, Until: v.Until, Incarnation: v.Life}
	out.Ended, out.ClientReset = out.BothEnds || v.Flags&WasReset != 0, v.Flags&(WasReset|OwnerReset|FinOut) == WasReset
	out.Flow, out.Buffered = Unword(v.Word)
	out.Nonce, out.Reporter = move.Nonce(v.Birth), move.Backend(v.Flags>>ReporterAt&backendMask)
	return out
}

// Never reports whether a flow is, as far as anybody can tell, no more than what a client has made up: no backend has answered it, or
// the answer may be to a made-up segment. One that has moved was some backend's: then it is neither opening nor balanced.
func (fl *Flow) Never(k Key) bool {
	return fl.To == 0 && (fl.Opening || fl.Midway || (fl.Epoch == 0 || fl.Balanced) && fl.Out == 0 && k.Client.Port() != 0 && !fl.Told && !fl.Named)
}

// Unseen reports whether a backend's word is all that is known of a flow.
func (fl *Flow) Unseen() bool { return fl.Reported && fl.In == 0 && fl.Out == 0 && fl.To == 0 }
