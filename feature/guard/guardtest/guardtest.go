// SPDX-License-Identifier: Apache-2.0

// Package guardtest runs scenarios against the product's own programs, with the scenario's clock.
// Tests and the lab use it.
package guardtest

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/guard/guardtest/bpf"
	"github.com/weir-project/weir/feature/guard/scenario"
)

// Options configure a guard.
type Options struct {
	Limit uint64 // packets per second
	IPv6  bool
	Hook  guard.Hook
	Seed  uint64 // the guard's secret; 0: random

	RealClock bool // use the kernel's clock instead of the packets' times
	// Batch makes Decide decide many packets in one run, several times as fast. It runs the guard's
	// code with the same state, but not the hook's program. Passes still runs the program.
	Batch bool
}

// Guard decides the packets of a scenario.
type Guard struct {
	*guard.Simulation
	batch   *batch // nil: one run for each packet
	frame   []byte
	source  int // offsets in frame
	port    int
	payload int
	ipv6    bool
}

// Destinations of the packets.
var (
	to4 = netip.MustParseAddrPort("10.77.0.2:443")
	to6 = netip.MustParseAddrPort("[fd00::2]:443")
)

// New creates a guard.
func New(o Options) (*Guard, error) {
	to := to4
	if o.IPv6 {
		to = to6
	}
	sim, err := guard.Simulate(o.Hook, guard.Limits{Total: guard.Limit(o.Limit)}, to, o.RealClock)
	if err != nil {
		return nil, fmt.Errorf("hook %s: %w", o.Hook, err)
	}
	if o.Seed != 0 {
		sim.Seed(o.Seed*0x9e3779b97f4a7c15, o.Seed*0xd6e8feb86659fd93+1)
	}
	g := &Guard{Simulation: sim, ipv6: o.IPv6, source: 26, port: 34, payload: 42}
	if o.IPv6 {
		g.source, g.port, g.payload = 22, 54, 62
	}
	g.frame = frame(to)
	if o.Batch {
		if g.batch, err = newBatch(sim.Maps(), to); err != nil {
			sim.Close()
			return nil, err
		}
	}
	return g, nil
}

// BatchProgram returns the program run by Decide; nil without Options.Batch.
func (g *Guard) BatchProgram() *ebpf.Program {
	if g.batch == nil {
		return nil
	}
	return g.batch.c.Programs[bpf.BatchProgGuardBatch]
}

// Close releases the guard.
func (g *Guard) Close() {
	if g.batch != nil {
		g.batch.c.Close()
	}
	g.Simulation.Close()
}

// frame returns a datagram with four bytes of payload, without its source.
func frame(to netip.AddrPort) []byte {
	udp := func(b []byte) {
		binary.BigEndian.PutUint16(b[2:], to.Port())
		binary.BigEndian.PutUint16(b[4:], 12)
	}
	if to.Addr().Is6() {
		b := make([]byte, 14+40+8+4)
		b[12], b[13], b[14] = 0x86, 0xdd, 0x60
		b[19], b[20], b[21] = 12, 17, 64
		copy(b[38:], to.Addr().AsSlice())
		udp(b[54:])
		return b
	}
	b := make([]byte, 14+20+8+4)
	b[12], b[14] = 8, 0x45
	binary.BigEndian.PutUint16(b[16:], 32)
	b[22], b[23] = 64, 17
	copy(b[30:], to.Addr().AsSlice())
	udp(b[34:])
	return b
}

// Frame returns the datagram as input of the program, valid until the next call.
func (g *Guard) Frame(p *scenario.Packet) []byte {
	if g.ipv6 {
		a := p.Src.IPv6()
		copy(g.frame[g.source:], a[:])
	} else {
		binary.BigEndian.PutUint32(g.frame[g.source:], p.Src.Identity)
	}
	binary.BigEndian.PutUint16(g.frame[g.port:], p.SrcPort)
	binary.BigEndian.PutUint32(g.frame[g.payload:], p.Payload)
	return g.frame
}

// Decide implements scenario.Limiter.
func (g *Guard) Decide(packets []scenario.Packet, verdicts []bool) (err error) {
	for g.batch != nil && len(packets) > 0 {
		n := min(batchSize, len(packets))
		if err := g.batch.decide(packets[:n], verdicts[:n], g.frame); err != nil {
			return err
		}
		packets, verdicts = packets[n:], verdicts[n:]
	}
	for i := range packets {
		if verdicts[i], err = g.Passes(packets[i].At, g.Frame(&packets[i])); err != nil {
			return err
		}
	}
	return nil
}
