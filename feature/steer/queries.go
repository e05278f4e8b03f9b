// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"net/url"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/kernel"
)

// DeviceReport is the answer to the query "devices": the sources of one service.
type DeviceReport struct {
	Service string         `json:"service"`
	Devices []state.Device `json:"devices"`
	Problem string         `json:"problem,omitempty"` // reason of missing data
}

// WhereReport is the answer to the query "where": the slots of sources of one service.
type WhereReport struct {
	Service   string             `json:"service"`
	Addresses []state.Assignment `json:"addresses"`
}

// Queries implements feature.Queried. "devices", "where" and "templates" take a service, "bindings" and "services" the inode
// number of a network namespace as netns.
func (Feature) Queries() []feature.Query {
	return []feature.Query{
		{Name: "devices", Answer: ofService(answerDevices)},
		{Name: "where", Answer: ofService(answerWhere)},
		{Name: "templates", Answer: ofService(func(r *kernel.Root, s *state.Service, _ url.Values) (any, error) { return templates.Templates(s, r) })},
		{Name: "bindings", Answer: func(ctx context.Context, r *kernel.Root, q url.Values) (any, error) {
			return bindings.Bindings(ctx, r, q.Get("netns"))
		}},
		{Name: "services", Answer: func(ctx context.Context, r *kernel.Root, q url.Values) (any, error) {
			return bindings.NamedServices(ctx, r, q.Get("netns"))
		}},
	}
}

// ofService returns an answer about the service in the parameter "service".
func ofService(answer func(*kernel.Root, *state.Service, url.Values) (any, error)) func(context.Context, *kernel.Root, url.Values) (any, error) {
	return func(ctx context.Context, r *kernel.Root, q url.Values) (any, error) {
		st, err := state.Read(ctx, r)
		if err != nil {
			return nil, err
		}
		s, err := st.Service(q.Get("service"))
		if err != nil {
			return nil, err
		}
		return answer(r, s, q)
	}
}

func answerDevices(r *kernel.Root, s *state.Service, _ url.Values) (any, error) {
	d, problem, err := s.Devices(r)
	templates.Unreplayed(s, r, d)
	out := DeviceReport{Service: s.Name, Devices: d}
	if problem != nil {
		out.Problem = "TCP sessions are not shown: " + problem.Error()
	}
	return out, err
}

func answerWhere(_ *kernel.Root, s *state.Service, q url.Values) (any, error) {
	var w state.WhatIf
	if err := w.Parse(q); err != nil {
		return nil, err
	}
	addrs, err := s.Sources(q["address"])
	if err != nil {
		return nil, err
	}
	places, err := s.Where(w, addrs...)
	return WhereReport{Service: s.Name, Addresses: places}, err
}

// Deliver implements feature.Deliverer.
func (Feature) Deliver(ctx context.Context, r *kernel.Root, p explain.Packet, every bool) (*explain.Explanation, error) {
	if every {
		return explain.ExplainEvery(ctx, r, p)
	}
	return explain.Explain(ctx, r, p)
}

// Report implements feature.Reporter. It returns the state with misplaced sessions, reasons of empty slots and services
// without a socket.
func (Feature) Report(ctx context.Context, r *kernel.Root, faults []kernel.Fault) (any, error) {
	st, err := state.Read(ctx, r)
	if err != nil {
		return st, err
	}
	st.CountMisplaced(ctx)
	st.ExplainEmpty(ctx)
	err = st.NoteUnserved(r)
	noteFaults(&st, faults)
	return st, err
}

// noteFaults adds damage of an engine to its services.
func noteFaults(st *state.State, faults []kernel.Fault) {
	for i := range st.Services {
		v := &st.Services[i]
		for _, f := range faults {
			if v.Problem == "" && f.Damage() && f.Feature == spec.Name && f.Instance.Scope == v.Scope() && (f.Instance.Name == v.Name || strings.HasPrefix(f.Instance.Name, "@")) {
				v.Problem = f.String() + ": " + f.Remedy
			}
		}
	}
}
