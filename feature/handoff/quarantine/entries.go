// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/handoff/repair"
)

// State is the treatment of a session's packets, see quarantine.h.
type State uint32

const (
	Shut     State = 1 // nothing reaches or leaves the socket: packets go back to the load balancer
	Quiet    State = 2 // no RST or FIN leaves
	Buffered State = 3 // like Shut, with packets buffered here
	Pass     State = 4 // packets reach the socket
	Left     State = 5 // the session is at another backend
)

// Entry is a session in the quarantine.
type Entry struct {
	Flow  repair.Flow
	State State
	Epoch move.Epoch
	Since uint64       // CLOCK_MONOTONIC, ns
	To    move.Backend // Left: the session's backend
}

// Lookup returns a session's entry, and false if there is none.
func (g *Quarantine) Lookup(f repair.Flow) (Entry, bool, error) {
	var v bpf.QuarantineQuarantineEntry
	err := g.sessions.Lookup(quarantineKey(f), &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Entry{}, false, nil
	} else if err != nil {
		return Entry{}, false, fmt.Errorf("quarantine of %s: %w", f, err)
	}
	return newEntry(f, v), true, nil
}

// Entries returns all entries.
func (g *Quarantine) Entries() (out []Entry, err error) {
	var k bpf.QuarantineQuarantineKey
	var v bpf.QuarantineQuarantineEntry
	it := g.sessions.Iterate()
	for it.Next(&k, &v) {
		out = append(out, newEntry(flowOfKey(k), v))
	}
	return out, it.Err()
}

func newEntry(f repair.Flow, v bpf.QuarantineQuarantineEntry) Entry {
	e := Entry{Flow: f, State: State(v.What), Epoch: move.Epoch(v.Epoch), Since: v.Since}
	if e.State == Left {
		e.To = move.Backend(v.Ifindex)
	}
	return e
}

// quarantineKey returns a pointer to the key. Package ebpf copies a pointer's target directly, but uses reflection
// for a value, which costs as much as the system call.
func quarantineKey(f repair.Flow) *bpf.QuarantineQuarantineKey {
	return &bpf.QuarantineQuarantineKey{Client: f.Remote.Addr().As16(), Service: f.Local.Addr().As16(), ClientPort: swap(f.Remote.Port()), ServicePort: swap(f.Local.Port())}
}

func flowOfKey(k bpf.QuarantineQuarantineKey) repair.Flow {
	return repair.Flow{Local: netip.AddrPortFrom(netip.AddrFrom16(k.Service).Unmap(), swap(k.ServicePort)),
		Remote: netip.AddrPortFrom(netip.AddrFrom16(k.Client).Unmap(), swap(k.ClientPort))}
}

// swap converts a port to network byte order, or back.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}
