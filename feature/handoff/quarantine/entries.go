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

// State is what a quarantine does with a session's packets: quarantine.h.
type State uint32

// States.
const (
	Shut     State = 1 // nothing reaches the socket, and nothing leaves it: packets go back to the load balancer
	Quiet    State = 2 // the kernel answers neither with a reset nor with an end
	Buffered State = 3 // as Shut, and packets wait here
	Pass     State = 4 // packets reach the socket
	Left     State = 5 // the session is at another backend
)

// Entry is a session that the quarantine knows.
type Entry struct {
	Flow  repair.Flow
	State State
	Epoch move.Epoch
	Since uint64       // CLOCK_MONOTONIC, ns
	To    move.Backend // of left: where the session is
}

// Lookup returns a session that the quarantine knows; false if it does not know it.
func (g *Quarantine) Lookup(f repair.Flow) (Entry, bool, error) {
	var v bpf.QuarantineQuarantineEntry
	err := g.sessions.Lookup(quarantineKey(f), &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Entry{}, false, nil
	} else if err != nil {
		return Entry{}, false, fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	return newEntry(f, v), true, nil
}

// Entries are all sessions that the quarantine knows.
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

// quarantineKey points to the key: package ebpf takes what a pointer leads to as it is, and reflects on a value, which takes as long as the
// kernel does.
func quarantineKey(f repair.Flow) *bpf.QuarantineQuarantineKey {
	return &bpf.QuarantineQuarantineKey{Client: f.Remote.Addr().As16(), Service: f.Local.Addr().As16(), ClientPort: swap(f.Remote.Port()), ServicePort: swap(f.Local.Port())}
}

func flowOfKey(k bpf.QuarantineQuarantineKey) repair.Flow {
	return repair.Flow{Local: netip.AddrPortFrom(netip.AddrFrom16(k.Service).Unmap(), swap(k.ServicePort)),
		Remote: netip.AddrPortFrom(netip.AddrFrom16(k.Client).Unmap(), swap(k.ClientPort))}
}

// swap turns a port into network byte order, or back.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}
