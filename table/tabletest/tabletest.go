// SPDX-License-Identifier: Apache-2.0

// Package tabletest has a program that looks addresses up in a table, for the tests of what writes tables.
package tabletest

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" probe probe.bpf.c

// Probe is a table's maps, and a program that reads them.
type Probe struct {
	Maps table.Maps
	c    *kernel.Collection
}

// Load makes an empty table of so many segments.
func Load(segments int) (*Probe, error) {
	spec, err := loadProbe()
	if err != nil {
		return nil, err
	}
	if err := table.Size(spec, "probe", segments); err != nil {
		return nil, err
	}
	p := &Probe{}
	if p.c, err = kernel.Load(spec, []string{probeProgProbeLookup}, nil); err != nil {
		return nil, err
	}
	if p.Maps, err = table.Of(p.c.Maps, "probe"); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Lookup has the program look an address up.
func (p *Probe) Lookup(a netip.Addr) (uint32, error) {
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
	verdict, err := p.c.Programs[probeProgProbeLookup].Run(&ebpf.RunOptions{Data: packet})
	if err != nil {
		return 0, err
	}
	if verdict != 2 {
		return 0, fmt.Errorf("verdict %d", verdict)
	}
	var v uint32
	return v, p.c.Variables[probeVarProbeValue].Get(&v)
}

// Close frees the maps and the program.
func (p *Probe) Close() { p.c.Close() }
