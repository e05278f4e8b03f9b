// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"encoding/binary"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// before handles a slot with a draining previous generation, like the program. That generation gets packets of its
// known UDP peers, and all packets if its successor is not complete.
func (x *explainer) before(s *state.Service, endpoint, slot int) (done bool, err error) {
	st := s.Slots[slot]
	if st.Drains == 0 || st.Withdrawn {
		return false, nil
	}
	e, err := s.Root.Open(s.Record.EngineInstance(s.PinScope), s.Record.ReaderMaps()...)
	if err != nil {
		return false, err
	}
	defer e.Close()
	d, err := slots.ReadPredecessor(e, s.Record, slot)
	if err != nil || !d.DrainsFor(s.Record.Row(slot)) || d.Over() {
		return false, err
	}
	known, err := x.knownTo(s, d, endpoint)
	if err != nil || !known && st.Admitted() {
		return false, err
	}
	var cookie uint64
	if e.Maps["sockets"].Lookup(d.Row*spec.MaxEndpoints+uint32(endpoint), &cookie) != nil {
		return false, nil // the socket is closed
	}
	if known {
		x.say("generation", "a known peer of the previous generation, process %d, which drains", d.Who.PID)
	} else {
		x.say("generation", "slot %d is not complete (%s), and the previous generation, process %d, still drains", slot, st.Reason, d.Who.PID)
	}
	return true, x.given(s, endpoint, slot, cookie)
}

// knownTo reports whether a packet comes from a known peer of the previous generation.
func (x *explainer) knownTo(s *state.Service, d slots.Predecessor, endpoint int) (bool, error) {
	if x.p.Proto != "udp" {
		return false, nil
	}
	o, err := s.Root.Open(record.Instance(s.PinScope, s.Name), "peers")
	if err != nil {
		return false, err
	}
	defer o.Close()
	k := bpf.SteerPeerKey{Addr: x.p.From.Addr().As16(), Endpoint: uint8(endpoint)}
	var port [2]byte
	binary.BigEndian.PutUint16(port[:], x.p.From.Port())
	k.Port = binary.NativeEndian.Uint16(port[:])
	var p bpf.SteerPeer
	if o.Maps["peers"].Lookup(k, &p) != nil {
		return false, nil
	}
	return p.Row == d.Row && int64(kernel.Monotonic()-p.Seen) <= int64(d.Idle), nil
}
