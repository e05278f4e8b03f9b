// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/kernel"
)

// TemplateState is the remembered templates of one service's exporters.
type TemplateState struct {
	Service   string     `json:"service"`
	Exporters []Exporter `json:"exporters"`
	Learnt    uint64     `json:"learnt"`   // templates learnt or changed
	Replayed  uint64     `json:"replayed"` // replays of one exporter's observation domain
	Refused   uint64     `json:"refused"`  // messages that were unreadable, too many or without room, and exporters forgotten for lack of room
	Problem   string     `json:"problem,omitempty"`
}

// Exporter is one observation domain (IPFIX) or source id (NetFlow v9) of one exporting process.
type Exporter struct {
	Address   netip.AddrPort `json:"address"`
	Collector netip.AddrPort `json:"collector"` // destination
	Protocol  string         `json:"protocol"`  // "ipfix" or "netflow9"
	Domain    uint32         `json:"domain"`
	Slot      int            `json:"slot"`
	Templates []Template     `json:"templates"`
	Messages  uint64         `json:"messages"` // since it was first remembered
	Last      time.Time      `json:"last_seen,omitzero"`
	Learnt    time.Time      `json:"learnt"` // time of the last new or changed template
	Replayed  time.Time      `json:"last_replay,omitzero"`
	Replays   uint32         `json:"replays"`
}

// Template is one template of an exporter.
type Template struct {
	ID      uint16 `json:"id"`
	Options bool   `json:"options,omitempty"`
	Bytes   int    `json:"bytes"` // of its record
}

// Count returns the number of templates.
func (t TemplateState) Count() (n int) {
	for _, e := range t.Exporters {
		n += len(e.Templates)
	}
	return n
}

// Templates returns the remembered exporters of a service, in order of address. Without a store it returns none and a
// problem.
func Templates(s *state.Service, r *kernel.Root) (TemplateState, error) {
	out := TemplateState{Service: s.Name, Exporters: []Exporter{}}
	if len(servicePorts(s)) == 0 {
		out.Problem = "the templates of its exporters are not kept: set templates: true in its steer section"
		return out, nil
	}
	o, err := r.Open(engine.TemplatesInstance(s.PinScope))
	if errors.Is(err, kernel.ErrNotExist) {
		out.Problem = "no weir serve has kept templates here"
		return out, nil
	} else if err != nil {
		return out, err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(o.Instance, record.ABI); err != nil {
		return out, err
	}
	all, _, err := loadSessions(o.Maps["store"])
	if err != nil {
		return out, err
	}
	scope := &Scope{Services: []*Service{{Service: s}}}
	for key, v := range all {
		if svc, _ := scope.findService(collectorAddr(key)); svc == nil {
			continue
		}
		out.Exporters = append(out.Exporters, exporter(s, key, v, o.Maps["sessions"]))
	}
	slices.SortFunc(out.Exporters, func(a, b Exporter) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Protocol, b.Protocol))
	})
	var counts bpf.TemplatesCounts
	var name [64]byte
	copy(name[:63], s.Name)
	if err := o.Maps["counts"].Lookup(name, &counts); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return out, err
	}
	out.Learnt, out.Replayed, out.Refused = counts.Learnt, counts.Replayed, counts.Refused
	return out, nil
}

func exporter(s *state.Service, key bpf.TemplatesSession, v *FlowSession, sessions *ebpf.Map) Exporter {
	var h bpf.TemplatesHeard
	_ = sessions.Lookup(key, &h) // zero: silent since it was restored
	e := Exporter{Address: exporterAddr(key), Collector: collectorAddr(key), Protocol: "netflow9", Domain: key.Domain,
		Messages: h.Messages, Last: kernel.WallTime(h.Last), Learnt: time.Unix(0, v.Learnt), Replays: v.Replays}
	if key.Version == ipfix.IPFIX {
		e.Protocol = "ipfix"
	}
	if v.Replayed != 0 {
		e.Replayed = time.Unix(0, v.Replayed)
	}
	if p, err := s.Where(state.WhatIf{}, e.Address.Addr()); err == nil {
		e.Slot = p[0].Slot
	}
	for _, t := range v.Templates {
		e.Templates = append(e.Templates, Template{ID: t.ID, Options: t.Options, Bytes: len(t.Record)})
	}
	return e
}
