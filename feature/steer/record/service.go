// SPDX-License-Identifier: Apache-2.0

package record

import (
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// BindKeys returns the keys of a service's ports in the map of bpf/bind.bpf.c.
func (p *Service) BindKeys() []bpf.BindBindKey {
	if !p.Service.SharePort {
		return nil
	}
	var out []bpf.BindBindKey
	for _, l := range p.Service.Listen {
		out = append(out, bpf.BindBindKey{Netns: p.Cookie, Port: l.Port, Proto: l.Proto})
	}
	return out
}

// Service is a service as pinned. The engine's maps follow it.
type Service struct {
	Service spec.Service `json:"service"`         // defaults filled in, seed drawn
	Netns   string       `json:"netns"`           // the namespace's name in the configuration
	Engine  spec.Engine  `json:"engine"`          // the chosen engine
	Reason  string       `json:"engine_reason"`   // reason of the choice
	ID      uint32       `json:"id"`              // index into steer_services
	Rows    []uint32     `json:"rows"`            // of the engine's maps, by slot. A slot keeps its row; with generations it alternates with Spare.
	Spare   []uint32     `json:"spare,omitempty"` // with generations: the other rows, by slot

	Overrides

	Table  []uint16 `json:"-"` // bucket to slot; stored in the service's own map
	Cookie uint64   `json:"-"` // of its namespace, or 0

	Recorded bool `json:"-"` // its pins are damaged: this is its record
}

// Row returns the row of a slot in the engine's maps.
func (p *Service) Row(slot int) uint32 { return p.Rows[slot] }

// value returns the service as read by the program.
func (p *Service) value() *bpf.SteerService {
	v := &bpf.SteerService{Seed: *p.Service.Seed, Slots: uint32(p.Service.Slots), Endpoints: uint32(len(p.Service.Endpoints())),
		OnEmpty: uint32(slices.Index(spec.OnEmptyCodes, p.Service.OnEmpty)), Id: p.ID}
	p.setPolicy(v)
	v.Tick = jiffy()
	copy(v.Bucket[:], p.Table)
	if p.Service.Migrate {
		v.Flags |= flagMigrate
	}
	if p.Service.Generations != nil {
		v.Flags |= flagGenerations
	}
	for slot, row := range p.Rows {
		v.Row[slot] = uint16(row)
	}
	return v
}

// jiffy returns the length of a jiffy in nanoseconds: the resolution of the coarse clocks (KTIME_LOW_RES in
// kernel/time/posix-timers.c).
func jiffy() uint32 {
	var ts unix.Timespec
	if unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &ts) != nil {
		return 0 // cannot fail for this clock
	}
	return uint32(ts.Nano())
}

// innerSpec returns the spec of a service's map. Parsing the object is the most expensive part of a service, so it
// happens once.
var innerSpec = sync.OnceValues(func() (*ebpf.MapSpec, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	return spec.Maps[bpf.SteerMapSteerServices].InnerMap, nil
})

// NewMap creates a service's map, to be stored in steer_services.
func NewMap(p *Service) (*ebpf.Map, error) {
	spec, err := innerSpec()
	if err != nil {
		return nil, err
	}
	inner := spec.Copy()
	inner.Name = "steer_service"
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return nil, fmt.Errorf("create map of a service: %w", err)
	}
	if err := m.Put(uint32(0), p.value()); err != nil {
		m.Close()
		return nil, fmt.Errorf("write service %s: %w", p.Service.Name, err)
	}
	return m, nil
}

// EngineInstance returns the instance of the service's engine.
func (p *Service) EngineInstance(scope string) kernel.Instance {
	return EngineInstance(scope, p.Engine)
}

// setPolicy sets the policy in the program's form.
func (p *Service) setPolicy(v *bpf.SteerService) {
	v.Policy = uint32(slices.Index(spec.Policies, p.Service.By))
	if q := p.Service.QUIC; q != nil {
		v.Quic, v.SidLen = uint8(slices.Index(spec.QUICFormats, q.Format)), uint8(q.ServerIDLength)
	}
	if len(p.Moves()) > 0 {
		v.Flags |= flagMoved
	}
}

// ReaderMaps returns the engine's maps with the state of slots.
func (p *Service) ReaderMaps() []string {
	maps := []string{"slots", "sockets", "verdicts"}
	if p.Service.Generations != nil {
		maps = append(maps, "gens")
	}
	return maps
}
