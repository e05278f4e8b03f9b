// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/guardtest/bpf"
	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/kernel"
)

const batchSize = 4096

// batch decides many packets in one run, by the guard's own code and a simulation's state, without
// the hook's program.
type batch struct {
	c       *kernel.Collection
	memory  *ebpf.Memory
	entries []bpf.BatchGuardEntry
	empty   bpf.BatchGuardEntry // template with the common destination
	ipv6    bool
}

// newBatch creates a batch using the maps of a simulation.
func newBatch(maps map[string]*ebpf.Map, to netip.AddrPort) (*batch, error) {
	spec, err := bpf.LoadBatch()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[bpf.BatchVarGuardClockGiven].Set(uint32(1)); err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for _, name := range []string{bpf.BatchMapGuardStates, bpf.BatchMapGuardTargets} {
		share[name] = maps[name]
	}
	b := &batch{entries: make([]bpf.BatchGuardEntry, batchSize), ipv6: to.Addr().Is6()}
	if b.c, err = kernel.Load(spec, []string{bpf.BatchProgGuardBatch}, share); err != nil {
		return nil, err
	}
	if b.memory, err = b.c.Maps[bpf.BatchMapGuardEntries].Memory(); err != nil {
		b.c.Close()
		return nil, fmt.Errorf("map the batch's packets: %w", err)
	}
	a := &b.empty.Addresses
	a.Daddr = to.Addr().As16()
	a.Dport = swapped(to.Port())
	a.Family, a.Proto = 4, 17
	if b.ipv6 {
		a.Family = 6
	}
	return b, nil
}

// swapped returns a port in network byte order, as loaded by a program from a packet.
func swapped(port uint16) (out uint16) {
	*(*[2]byte)(unsafe.Pointer(&out)) = [2]byte{byte(port >> 8), byte(port)}
	return out
}

// decide decides at most batchSize packets. frame is any valid input of a test run.
func (b *batch) decide(packets []scenario.Packet, verdicts []bool, frame []byte) error {
	entries := b.entries[:len(packets)]
	for i := range packets {
		p, e := &packets[i], &entries[i]
		*e = b.empty
		e.At = p.At
		e.Addresses.Sport = swapped(p.SrcPort)
		if b.ipv6 {
			e.Addresses.Saddr = p.Src.IPv6()
		} else {
			a := p.Src.IPv4()
			e.Addresses.Saddr[10], e.Addresses.Saddr[11] = 0xff, 0xff
			copy(e.Addresses.Saddr[12:], a[:])
		}
	}
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), len(entries)*int(unsafe.Sizeof(entries[0])))
	if _, err := b.memory.WriteAt(raw, 0); err != nil {
		return err
	}
	if err := b.c.Variables[bpf.BatchVarGuardBatchSize].Set(uint32(len(entries))); err != nil {
		return err
	}
	done, err := b.c.Programs[bpf.BatchProgGuardBatch].Run(&ebpf.RunOptions{Data: frame})
	if err != nil {
		return fmt.Errorf("decide %d packets: %w", len(entries), err)
	}
	if int(done) != len(entries) {
		return fmt.Errorf("the guard decided %d packets of %d", done, len(entries))
	}
	if _, err := b.memory.ReadAt(raw, 0); err != nil {
		return err
	}
	for i := range entries {
		verdicts[i] = entries[i].Passed != 0
	}
	return nil
}
