// SPDX-License-Identifier: Apache-2.0

// Package flow converts the records of flows in the load balancer's maps.
package flow

import (
	"encoding/binary"
	"net/netip"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/ring"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/jhash"
)

// Key is the key of a flow: the client's end and the service.
type Key struct {
	Client  netip.AddrPort // port 0 for a service by source
	Service int            // the number, and above it the tag of the address: see spec.Service.Tag
}

// Flow is the record of a flow.
type Flow struct {
	move.Flow
	Buffered    bool         // packets to the owner go to the buffer device
	Seen        uint64       // CLOCK_MONOTONIC in ns, of the latest packet
	In, Out     uint64       // packets from the client, and from the owner
	Ended       bool         // reset, or closed by both sides
	BothEnds    bool         // closed by both sides
	Reset       bool         // reset by its owner, without a packet of the client since
	ClientReset bool         // reset by the client alone, which anybody can forge
	Opening     bool         // learned from a SYN, or reset by its owner, and the owner has not shown a session since
	Midway      bool         // learned from a segment other than a SYN, and the owner has not shown a session since
	Unanswered  bool         // only SYNs of the client and resets of the owner since it was opened
	Balanced    bool         // assigned by the data path, with an epoch of its own
	Told        bool         // recorded by Learn or override, without a packet
	Reported    bool         // recorded by a backend's report
	Named       bool         // its owner's agent has reported the session since the owner's latest answer to a SYN
	Reporter    move.Backend // the reporting backend; 0: unknown
	Unasked     bool         // learned from the owner's packets, and confirmed neither by its client nor by the owner's agent
	Pinned      bool         // overridden until Release
	Until       uint64       // CLOCK_MONOTONIC in ns: deadline of the buffering, or time of the latest move
	Incarnation uint64       // instance of the owner's agent that acquired the flow; 0: none
}

// These are the fields of a flow's word: see lb.h.
const (
	backendBits  = 10
	backendMask  = 1<<backendBits - 1
	ToAt         = backendBits
	BeforeAt     = 2 * backendBits
	BufferingBit = 1 << 30
	BufferedBit  = 1 << 31
	EpochAt      = 32
)

// These are the flags of a flow: see lb.h.
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
	ReporterAt = 16 // the reporting backend
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

// Unword unpacks the owners of a flow.
func Unword(w uint64) (f move.Flow, buffered bool) {
	return move.Flow{Owner: move.Backend(w & backendMask), To: move.Backend(w >> ToAt & backendMask), Predecessor: move.Backend(w >> BeforeAt & backendMask),
		Buffering: w&BufferingBit != 0, Epoch: move.Epoch(w >> EpochAt)}, w&BufferedBit != 0
}

// Raw returns the data path's form. It is a pointer because package ebpf copies memory behind a
// pointer, and reflects on a value.
func (k Key) Raw() *bpf.LBLbFlowKey {
	return &bpf.LBLbFlowKey{Client: k.Client.Addr().As16(), Port: Swap(k.Client.Port()), Service: uint16(k.Service)}
}

// ParseKey converts the data path's form.
func ParseKey(r bpf.LBLbFlowKey) Key {
	return Key{Client: netip.AddrPortFrom(netip.AddrFrom16(r.Client).Unmap(), Swap(r.Port)), Service: int(r.Service)}
}

// Bucket returns the flow's bucket in its service's ring, as the data path does.
func (k Key) Bucket() int {
	return int(jhash.Addr(uint32(Swap(k.Client.Port())), k.Client.Addr()) % ring.Buckets)
}

// Swap converts a port to network byte order, or back.
func Swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// Parse converts the data path's form.
func Parse(v bpf.LBLbFlow) Flow {
	out := Flow{Seen: v.Seen, In: v.In, Out: v.Out, BothEnds: v.Flags&(FinIn|FinOut) == FinIn|FinOut, Reset: v.Flags&ResetOut != 0,
		Opening: v.Flags&Opening != 0, Midway: v.Flags&Midway != 0, Unanswered: v.Flags&NoAnswer != 0, Balanced: v.Flags&Balanced != 0, Told: v.Flags&Told != 0, Reported: v.Flags&Reported != 0, Named: v.Flags&Named != 0, Unasked: v.Flags&Unasked != 0, Pinned: v.Flags&Pinned != 0, Until: v.Until, Incarnation: v.Life}
	out.Ended, out.ClientReset = out.BothEnds || v.Flags&WasReset != 0, v.Flags&(WasReset|OwnerReset|FinOut) == WasReset
	out.Flow, out.Buffered = Unword(v.Word)
	out.Nonce, out.Reporter = move.Nonce(v.Birth), move.Backend(v.Flags>>ReporterAt&backendMask)
	return out
}

// Never reports whether a flow may be no more than a client's forgery. No backend has answered it,
// or the answer may be to a forged segment. A moved flow had a backend's session. It is neither
// opening nor balanced.
func (fl *Flow) Never(k Key) bool {
	return fl.To == 0 && (fl.Opening || fl.Midway || (fl.Epoch == 0 || fl.Balanced) && fl.Out == 0 && k.Client.Port() != 0 && !fl.Told && !fl.Named)
}

// Unseen reports whether a flow is known by a backend's report alone.
func (fl *Flow) Unseen() bool { return fl.Reported && fl.In == 0 && fl.Out == 0 && fl.To == 0 }
