// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

var _ feature.Restorer = Feature{}

// savedState is the saved state of steering, independent of pins and files.
type savedState struct {
	Services  []savedService             `json:"services,omitempty"`
	Templates map[string]templates.Saved `json:"templates,omitempty"` // by scope
	Cookies   map[string]uint64          `json:"cookies,omitempty"`   // of the templates' namespaces, by scope
}

// savedService is a service with its seed, its table and the operator overrides.
type savedService struct {
	Scope   string                     `json:"scope"`
	Cookie  uint64                     `json:"cookie,omitempty"` // of the namespace
	Was     *record.Service            `json:"was"`
	Table   []byte                     `json:"table"` // slot by bucket
	Devices []byte                     `json:"devices,omitempty"`
	Members map[int]templates.MemberID `json:"members,omitempty"` // by slot
}

// Save implements feature.Restorer.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	all, err := r.Known(spec.Name)
	if err != nil {
		return nil, err
	}
	out := savedState{Templates: map[string]templates.Saved{}, Cookies: map[string]uint64{}}
	engines := map[kernel.Instance]*kernel.Opened{}
	defer func() {
		for _, o := range engines {
			o.Close()
		}
	}()
	for _, i := range all {
		if i.Name == engine.TemplatesName {
			t, err := templates.Save(r, i.Scope)
			if err != nil {
				return nil, err
			}
			if len(t) > 0 {
				out.Templates[i.Scope] = t
				m, _ := record.ReadMeta(r, i)
				out.Cookies[i.Scope] = m.Cookie
			}
		}
		if !kernel.ValidName(i.Name) {
			continue
		}
		s, err := saveService(r, i, engines)
		if errors.Is(err, kernel.ErrUnreadable) {
			return nil, err
		} else if err != nil {
			continue // removed meanwhile, or unreadable and unchanged
		}
		out.Services = append(out.Services, s)
	}
	return json.Marshal(out)
}

// saveService reads a service. It leaves the pins of its engine open for the next service.
func saveService(r *kernel.Root, i kernel.Instance, engines map[kernel.Instance]*kernel.Opened) (savedService, error) {
	p, err := record.Read(r, i)
	if err != nil {
		return savedService{}, err
	}
	s := savedService{Scope: i.Scope, Cookie: p.Cookie, Was: p, Members: map[int]templates.MemberID{}}
	for _, slot := range p.Table {
		s.Table = append(s.Table, byte(slot))
	}
	if l, err := record.ReadDevices(r, p, i.Scope); err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return s, err
	} else if l != nil {
		s.Devices = l.Text
	}
	at := p.EngineInstance(i.Scope)
	if engines[at] == nil {
		if engines[at], err = r.Open(at, "slots"); errors.Is(err, kernel.ErrNotExist) {
			return s, nil // its engine is missing
		} else if err != nil {
			return s, err
		}
	}
	for slot, row := range p.Rows {
		if who, err := slots.ProcessIn(engines[at], row); err != nil {
			return s, err
		} else if who.PID != 0 {
			s.Members[slot] = templates.MemberID{Tgid: uint32(who.PID), Start: who.Start}
		}
	}
	return s, nil
}

// PlanRestore implements feature.Restorer. Later operator changes stay.
func (Feature) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (feature.Plan, error) {
	var plan feature.Plan
	var was savedState
	if err := json.Unmarshal(saved, &was); err != nil {
		return plan, fmt.Errorf("decode the saved services: %w", err)
	}
	have, err := state.Read(ctx, r)
	if err != nil {
		return plan, err
	}
	b := newBatch()
	var targets []target
	members := map[slots.Slot]templates.MemberID{}
	for _, s := range was.Services {
		t, err := s.target(b)
		if errors.Is(err, slots.ErrNetnsGone) {
			plan.Warn("service %s: its network namespace (%s) is gone", s.Was.Service.Name, s.Was.Netns)
			continue
		} else if err != nil {
			return plan, err
		}
		targets = append(targets, t)
		for slot, who := range s.Members {
			members[slots.Slot{Scope: t.scope, Service: t.service.Name, Slot: slot}] = who
		}
	}
	if err := b.plan(ctx, &plan, have, targets); err != nil {
		return plan, err
	}
	for _, t := range targets {
		if stays, err := t.stays(have); err == nil && !stays {
			t.planReturns(&plan, have, members)
		}
	}
	for _, scope := range slices.Sorted(maps.Keys(was.Templates)) {
		ns, err := netns.OfScope("", scope, was.Cookies[scope])
		if errors.Is(err, slots.ErrNetnsGone) {
			continue
		} else if err == nil {
			ns.Close()
			err = was.Templates[scope].Plan(&plan, r, scope)
		}
		if err != nil {
			return plan, err
		}
	}
	b.finish(&plan)
	plan.Outages = nil // it restores the previous state
	return plan, nil
}

// target returns a saved service as a wanted one.
func (s savedService) target(b *batch) (target, error) {
	inode, err := record.ScopeInode(s.Scope)
	if err != nil {
		return target{}, err
	}
	id := netns.ID{Inode: inode, Cookie: s.Cookie}
	ref, err := netns.Reference(s.Was.Netns, id)
	if err != nil {
		return target{}, err
	}
	t := target{service: s.Was.Service.WithDefaults(), scope: s.Scope, netns: ref, id: id, batch: b, was: &former{live: s.Was.Overrides}}
	t.service.Engine = s.Was.Engine // auto would keep the current engine
	for _, slot := range s.Table {
		t.was.table = append(t.was.table, uint16(slot))
	}
	if len(t.was.table) != spec.Buckets {
		return t, fmt.Errorf("the saved service %s has a table of %d buckets, want %d", t.service.Name, len(t.was.table), spec.Buckets)
	}
	if s.Was.Devices != nil {
		t.devices, err = spec.ParseDevices("the saved devices of service "+t.service.Name, s.Devices)
	}
	return t, err
}

// planReturns gives slots back to members that no configuration names: they registered themselves or were registered.
func (t target) planReturns(plan *feature.Plan, have state.State, members map[slots.Slot]templates.MemberID) {
	s, _ := serviceAt(have, t.scope, t.service.Name)
	for n := range t.service.Slots {
		slot := slots.Slot{Scope: t.scope, Service: t.service.Name, Slot: n}
		who, had := members[slot]
		m := t.service.Member(n)
		if !had || m != nil && m.User == "" || s != nil && n < len(s.Slots) && s.Slots[n].Admitted() {
			continue
		}
		member := service.Member{Slot: n, PID: int(who.Tgid)}
		if m != nil {
			member.Bound, member.Keep = m.Bound, m.Keep
		}
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "adopt", Object: fmt.Sprintf("slot %d of service %s", n, t.service.Name), Detail: member.String(),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) {
				if now, err := slots.FindProcess(member.PID); err != nil || now.Start != who.Start {
					return "stays empty: its member has exited", nil
				}
				_, err := t.batch.admit(ctx, l, slot, &member, &engine.Vetting{Rate: t.rate, Proven: map[slots.Process]bool{{PID: member.PID, Start: who.Start}: true}})
				if engine.NotYet(err) {
					return "stays empty: " + err.Error(), nil
				} else if err == nil {
					engine.Remark(l.Root, slot, nil)
				}
				return "", err
			}}))
	}
}

// serviceAt returns the state of a service in a namespace.
func serviceAt(st state.State, scope, name string) (*state.Service, bool) {
	i := slices.IndexFunc(st.Services, func(s state.Service) bool { return s.Name == name && s.PinScope == scope })
	if i < 0 {
		return nil, false
	}
	return &st.Services[i], true
}

// former is the previous assignment of a service's devices.
type former struct {
	live  record.Overrides
	table []uint16
}

// shape gives p the former table. apply removes only overrides of removed slots. All other differences are later
// operator changes and stay.
func (f *former) shape(p, now *record.Service) {
	file, list := p.Devices, p.List
	p.Overrides = f.live.Clone()
	if now != nil {
		p.Overrides = f.since(now)
	}
	p.Devices, p.List = file, list
	p.Table, p.Home = slices.Clone(f.table), slices.Clone(f.live.Home)
	p.DropGone()
	if slices.Equal(p.Drained, f.live.Drained) && maps.Equal(p.Placed, f.live.Placed) {
		return
	}
	if len(p.Drained) > 0 && len(p.Home) == 0 {
		for _, slot := range f.table {
			p.Home = append(p.Home, byte(slot))
		}
	}
	p.Rebalance()
}

// since returns the current operator changes, plus those lost with removed slots.
func (f *former) since(now *record.Service) record.Overrides {
	v, slots := now.Overrides.Clone(), now.Service.Slots
	for a, slot := range f.live.Moved {
		if slot >= slots {
			v.Moved = put(v.Moved, a, slot)
		}
	}
	for b, to := range f.live.Placed {
		if v.Placed[b].To == to.To || to.To >= slots {
			v.Placed = put(v.Placed, b, to)
		}
	}
	for _, slot := range f.live.Drained {
		if slot >= slots && !v.IsDrained(slot) {
			v.Drained = append(v.Drained, slot)
		}
	}
	slices.Sort(v.Drained)
	return v
}

func put[K comparable, V any](m map[K]V, k K, v V) map[K]V {
	if m == nil {
		m = map[K]V{}
	}
	m[k] = v
	return m
}

// moved reports whether a published service assigns devices to other slots than t.
func (t target) moved(have *record.Service) bool {
	p := &record.Service{Service: t.service}
	p.SetDevices(t.devices)
	p.Shape(have)
	t.was.shape(p, have)
	return !slices.Equal(p.Table, have.Table) || !maps.EqualFunc(p.Moved, have.Moved, func(a, b int) bool { return a == b }) ||
		!maps.Equal(p.Placed, have.Placed) || !slices.Equal(p.Drained, have.Drained)
}
