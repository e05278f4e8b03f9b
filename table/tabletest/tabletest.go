// SPDX-License-Identifier: Apache-2.0

// Package tabletest looks addresses up with a BPF program, for tests of table writers.
package tabletest

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
	"github.com/weir-project/weir/table/tabletest/bpf"
)

// Probe is the maps of a table and a program reading them.
type Probe struct {
	Maps table.Maps
	c    *kernel.Collection
}

// Load creates an empty table of segments MiB.
func Load(segments int) (*Probe, error) {
	spec, err := bpf.LoadProbe()
	if err != nil {
		return nil, err
	}
	if err := table.Size(spec, "probe", segments); err != nil {
		return nil, err
	}
	p := &Probe{}
	if p.c, err = kernel.Load(spec, []string{bpf.ProbeProgProbeLookup}, nil); err != nil {
		return nil, err
	}
	if p.Maps, err = table.Find(p.c.Maps, "probe"); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Lookup looks up an address with the BPF program.
func (p *Probe) Lookup(a netip.Addr) (v uint32, err error) {
	if err := run(p.c.Programs[bpf.ProbeProgProbeLookup], request(a, 0, 0)); err != nil {
		return 0, err
	}
	return v, p.c.Variables[bpf.ProbeVarProbeValue].Get(&v)
}

// Bound is the maps of bindings and a program reading them.
type Bound struct {
	Maps table.BindingMaps
	c    *kernel.Collection
}

// LoadBindings creates empty bindings with room for a number of them.
func LoadBindings(bindings int) (*Bound, error) {
	spec, err := bpf.LoadProbe()
	if err != nil {
		return nil, err
	}
	if err := table.SizeBindings(spec, "bound", bindings); err != nil {
		return nil, err
	}
	p := &Bound{}
	if p.c, err = kernel.Load(spec, []string{bpf.ProbeProgProbeBindings}, nil); err != nil {
		return nil, err
	}
	if p.Maps, err = table.FindBindings(p.c.Maps, "bound"); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Lookup looks up the destination of a packet with the BPF program. It returns the value, 0 if
// nothing is bound, and the length of the prefix.
func (p *Bound) Lookup(a netip.Addr, proto uint8, port uint16) (value uint32, bits int, err error) {
	if err := run(p.c.Programs[bpf.ProbeProgProbeBindings], request(a, proto, port)); err != nil {
		return 0, 0, err
	}
	var v uint64
	err = p.c.Variables[bpf.ProbeVarProbeBound].Get(&v)
	return uint32(v) & table.MaxBound, int(v >> 32 & 0xff), err
}

// Close frees the maps and the program.
func (p *Bound) Close() { p.c.Close() }

// request returns the query as a packet.
func request(a netip.Addr, proto uint8, port uint16) []byte {
	packet := make([]byte, 64)
	if a.Is4() {
		b := a.As4()
		binary.NativeEndian.PutUint32(packet[4:], binary.BigEndian.Uint32(b[:]))
	} else {
		binary.NativeEndian.PutUint32(packet, 1)
		b := a.As16()
		for i := range 4 {
			binary.NativeEndian.PutUint32(packet[4+4*i:], binary.BigEndian.Uint32(b[4*i:]))
		}
	}
	binary.NativeEndian.PutUint32(packet[20:], uint32(proto))
	binary.NativeEndian.PutUint32(packet[24:], uint32(port))
	return packet
}

func run(p *ebpf.Program, packet []byte) error {
	verdict, err := p.Run(&ebpf.RunOptions{Data: packet})
	if err == nil && verdict != 2 {
		err = fmt.Errorf("verdict %d", verdict)
	}
	return err
}

// Close frees the maps and the program.
func (p *Probe) Close() { p.c.Close() }
