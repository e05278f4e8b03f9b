// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
	"github.com/weir-project/weir/service"
)

// loadDevices reads the devices file of a service with by: device.
func (t *target) loadDevices() error {
	if t.service.By != spec.ByDevice {
		return nil
	}
	var err error
	if t.devices, err = spec.LoadDevices(t.service.Devices); err != nil {
		return fmt.Errorf("services.%s.steer.devices: %w", t.service.Name, err)
	}
	return nil
}

// inherits returns the record that a service continues from.
func (t target) inherits(old *record.Service) *record.Service {
	if old != nil {
		return old
	}
	return t.from
}

// room is the use of an engine.
type room struct{ services, rows int }

// checkLimits rejects services that exceed an engine's limits, before any change. Services are created and changed in
// file order and removed at the end, so the maximum at any time counts.
func checkLimits(have state.State, want []target) error {
	type engineOf struct {
		scope string
		kind  spec.Engine
	}
	used := map[engineOf]room{}
	before := map[string]*record.Service{}
	for i := range have.Services {
		s := &have.Services[i]
		at := engineOf{s.PinScope, s.Engine}
		used[at] = room{used[at].services + 1, used[at].rows + len(s.Record.Rows) + len(s.Record.Spare)}
		before[s.PinScope+"/"+s.Name] = s.Record
	}
	for _, t := range want {
		was := before[t.scope+"/"+t.service.Name]
		kind, _, err := record.ChooseEngine(t.service, was)
		if err != nil {
			return fmt.Errorf("services.%s: %w", t.service.Name, err)
		}
		at := engineOf{t.scope, kind}
		now, rows, freed := used[at], t.service.Rows(), 0
		switch {
		case was == nil || was.Engine != kind:
			now.services++
		case slices.Equal(was.Service.Endpoints(), t.service.Endpoints()):
			kept := len(was.Rows) + len(was.Spare)
			rows, freed = max(rows-kept, 0), max(kept-rows, 0)
		default: // both exist until the new one is in force
			freed = len(was.Rows) + len(was.Spare)
		}
		now.rows += rows
		if now.services > spec.MaxServices {
			return t.service.Spec.Pos.Errorf("services.%s is one too many: engine %s supports %d services per network namespace (%s), including services removed by this change: merge or remove some first", t.service.Name, kind, spec.MaxServices, t.netns)
		}
		if now.rows > spec.MaxRows {
			return t.service.Spec.Pos.Errorf("services.%s has too many slots: engine %s supports %s per network namespace (%s), including slots removed by this change: lower slots, or remove services first", t.service.Name, kind, printable.Count(spec.MaxRows, "slot"), t.netns)
		}
		now.rows -= freed
		used[at] = now
		if was != nil && was.Engine != kind {
			old := engineOf{t.scope, was.Engine}
			used[old] = room{used[old].services - 1, used[old].rows - len(was.Rows) - len(was.Spare)}
		}
	}
	return nil
}

// warnAbout adds warnings about operator overrides of a service.
func warnAbout(s *state.Service, plan *feature.Plan, t target) {
	p := *s.Record
	p.Overrides, p.Service = s.Record.Overrides.Clone(), t.service
	p.DropGone()
	if p.Bypassed {
		plan.Warn("service %s is bypassed: the kernel alone chooses until weir bypass --off %s", s.Name, s.Name)
	}
	for n := range t.service.Slots {
		if s.Withdrawn(n) {
			plan.Warn("slot %d of service %s stays withdrawn until weir steer admit %s --slot %d", n, s.Name, s.Name, n)
		}
	}
	for _, slot := range p.Drained {
		plan.Warn("slot %d of service %s is drained until weir steer undrain %s --slot %d", slot, s.Name, s.Name, slot)
	}
	if n := len(p.Moved) + len(p.Placed); n > 0 {
		plan.Warn("%s and %s of service %s stay moved by weir steer move: weir steer status lists them", printable.Count(len(p.Moved), "device"), printable.Count(len(p.Placed), "bucket"), s.Name)
	}
	if gone := len(s.Record.Moved) - len(p.Moved) + len(s.Record.Placed) - len(p.Placed); gone > 0 {
		plan.Warn("%d moves of service %s are forgotten because their slots are removed", gone, s.Name)
	}
}

// Feature implements steering for host.
type Feature struct {
	Hand reset.Hand // for Run: moves sessions before they are reset; nil: none
}

var _ feature.Feature[spec.Config, state.State] = Feature{}

// Name implements feature.Feature.
func (Feature) Name() string { return spec.Name }

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) ([]string, bool) { return engine.PinnedMaps(i) }

// MapPrefixes implements feature.Mapped.
func (Feature) MapPrefixes() []string {
	return []string{"steer_", "bound_", "bind_", "copy_", "templates_"}
}

// Needs implements feature.Feature.
func (Feature) Needs(c spec.Config) []kernel.Need {
	share := probe.BindShare
	share.Optional = !slices.ContainsFunc(c.Services, func(s spec.Service) bool { return s.SharePort })
	copies := probe.TCFilter
	copies.Optional = !slices.ContainsFunc(c.Services, func(s spec.Service) bool { return s.Copy != "" })
	return append(spec.EngineNeeds(spec.EngineSkLookup), hook.SkReuseport, hook.ReuseportArray, hook.QueueMigration, engine.GroupPrograms, probe.PacketFilter, share, copies)
}

// State implements feature.Feature.
func (Feature) State(ctx context.Context, r *kernel.Root) (state.State, error) {
	return state.Read(ctx, r)
}

// Plan implements feature.Feature.
func (Feature) Plan(ctx context.Context, have state.State, want spec.Config) (feature.Plan, error) {
	var plan feature.Plan
	b := newBatch()
	var placed []spec.Service // with the resolved namespace
	var targets []target
	for _, s := range want.Services {
		ns, _, err := s.FindNetns(ctx)
		if err != nil {
			return plan, s.Spec.Pos.Errorf("services.%s: netns: %w", s.Name, err)
		}
		t := newTarget(s, ns)
		ns.Close()
		s.Netns, t.rate, t.batch = t.scope, want.Rate, b
		if err := t.loadDevices(); err != nil {
			return plan, err
		}
		if err := errors.Join(spec.Overlaps(placed, s)...); err != nil {
			return plan, err
		}
		placed = append(placed, s)
		targets = append(targets, t)
	}
	err := b.plan(ctx, &plan, have, targets)
	b.finish(&plan)
	return plan, err
}

// plan adds the steps that make the services of all network namespaces match the targets.
func (b *batch) plan(ctx context.Context, plan *feature.Plan, have state.State, targets []target) error {
	for _, o := range have.Outdated {
		plan.Add(upgradeStep(o))
	}
	plan.Stays(unreadServices(have, false))
	for _, u := range unreadServices(have, true) { // before any engine is opened, so their entries are not kept
		step := engine.RemoveStep(u.Scope, u.Name)
		step.Detail = "it has neither usable pins nor a record"
		plan.Add(step)
	}
	if err := checkLimits(have, targets); err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, t := range targets {
		wanted[t.scope+"/"+t.service.Name] = true
		if stays, err := t.stays(have); err != nil || stays {
			if err != nil {
				return err
			}
			continue
		}
		if err := planService(ctx, plan, have, t); err != nil {
			return err
		}
	}
	for _, s := range have.Services {
		if !wanted[s.PinScope+"/"+s.Name] && have.Reads(s.PinScope, s.Engine) {
			plan.Add(b.removal(&s))
			removalOutages(&s, plan)
		}
	}
	return nil
}

// unreadServices returns the unreadable instances: either damaged services, which a plan replaces or removes, or all
// others.
func unreadServices(have state.State, damaged bool) (out instances.Unreadable) {
	for _, u := range have.Unreadable {
		if damaged == (kernel.ValidName(u.Name) && errors.Is(u.Err, kernel.ErrDamaged)) {
			out = append(out, u)
		}
	}
	return out
}

// stays reports whether a service must stay unchanged, because it or a necessary engine is unreadable.
func (t target) stays(have state.State) (bool, error) {
	if unreadServices(have, false).Has(record.Instance(t.scope, t.service.Name)) {
		return true, nil
	}
	var was *record.Service
	if s, ok := serviceAt(have, t.scope, t.service.Name); ok {
		was = s.Record
		if !have.Reads(t.scope, s.Engine) {
			return true, nil
		}
	}
	kind, _, err := record.ChooseEngine(t.service, was)
	if err != nil {
		return false, fmt.Errorf("services.%s: %w", t.service.Name, err)
	}
	return !have.Reads(t.scope, kind), nil
}

// target is a wanted service with its namespace resolved.
type target struct {
	service spec.Service
	scope   string
	netns   string // reference for people, and to open it again
	id      netns.ID
	devices *spec.DeviceList
	rate    *spec.Rate      // of resets; nil: the service's rate
	from    *record.Service // its record in another engine
	served  map[int]engine.ServedSlot
	batch   *batch  // nil: outside a batch
	empty   []error // by slot: the planned reason to be empty
	was     *former // form to restore; nil: none
}

func planService(ctx context.Context, plan *feature.Plan, have state.State, t target) error {
	i := slices.IndexFunc(have.Services, func(s state.Service) bool {
		return s.Name == t.service.Name && s.PinScope == t.scope
	})
	object := "service " + t.service.Name
	if i < 0 {
		kind, _, err := record.ChooseEngine(t.service, nil)
		if err != nil {
			return fmt.Errorf("services.%s: %w", t.service.Name, err)
		}
		if err := t.takeover(ctx, plan, have, nil, kind); err != nil {
			return err
		}
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "create", Object: object, Detail: fmt.Sprintf("%s by %s on %s, in %s",
			printable.Count(t.service.Slots, "slot"), t.service.By, listens(t.service), t.netns),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", t.publish(ctx, l) }}))
		planMembers(plan, t, nil)
		return nil
	}
	s := have.Services[i]
	kind, _, err := record.ChooseEngine(t.service, s.Record)
	if err != nil {
		return fmt.Errorf("services.%s: %w", t.service.Name, err)
	}
	if err := errors.Join(t.outages(ctx, plan, &s, kind), t.takeover(ctx, plan, have, &s, kind)); err != nil {
		return err
	}
	d, change := differences(s.Record, t), t.publish
	if kind != s.Engine && s.Problem != state.ProblemEngine {
		d, change = append([]string{fmt.Sprintf("engine %s → %s", s.Engine, kind)}, d...), t.changeEngine
	}
	if s.Problem == state.ProblemEngine || s.Problem == state.ProblemSocketHolder || s.Problem == engine.ProblemBind {
		d = append(d, s.Problem)
	}
	if len(d) > 0 {
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "change", Object: object, Detail: strings.Join(d, "; "),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", change(ctx, l) }}))
	}
	planMembers(plan, t, &s)
	warnAbout(&s, plan, t)
	return nil
}

// planMembers adds a step for every slot without its configured member.
func planMembers(plan *feature.Plan, t target, have *state.Service) {
	vet := &engine.Vetting{Rate: t.rate, Limit: engine.UnderLock} // shared by all: hung checks must not add up
	for _, m := range t.service.Members {
		if have.Withdrawn(m.Slot) { // until an operator admits it again
			continue
		}
		if have != nil && m.Slot < len(have.Slots) && have.Slots[m.Slot].Admitted() && have.Slots[m.Slot].Member == m.String() && sameBound(have.Record, m) {
			continue
		}
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "adopt", Object: fmt.Sprintf("slot %d of service %s", m.Slot, t.service.Name), Detail: m.String(),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) {
				slot := slots.Slot{Scope: t.scope, Service: t.service.Name, Slot: m.Slot}
				_, err := t.batch.admit(ctx, l, slot, nil, vet)
				if note, kept := keeps(l.Root, slot, err); kept {
					engine.RemarkKept(l.Root, slot, err)
					return note, nil
				}
				engine.Remark(l.Root, slot, err)
				if engine.NotYet(err) {
					return "stays empty: " + err.Error(), nil
				}
				return "", err
			}, Foresee: func(ctx context.Context) string { return t.foreseeEmpty(ctx, m, have) }}))
	}
}

// sameBound reports whether a slot's member has the configured addresses of its sockets already.
func sameBound(p *record.Service, m service.Member) bool {
	was := p.Service.Member(m.Slot)
	return was == nil || slices.EqualFunc(was.Bound, m.Bound, func(a, b service.Listen) bool { return a.String() == b.String() })
}

// keeps reports whether another process keeps a slot without its configured member.
func keeps(r *kernel.Root, slot slots.Slot, why error) (note string, kept bool) {
	if !engine.NotYet(why) {
		return "", false
	}
	all, err := slots.Open(r, slot.Scope, slot.Service)
	if err != nil {
		return "", false
	}
	defer all.Close()
	pid, kept, err := all.Admitted(slot.Slot)
	return fmt.Sprintf("stays with %s until its member is there: %v", service.ProcessName(pid), why), kept && err == nil
}

// foreseeEmpty returns the foreseen note of a member that would not be admitted, or "".
func (t *target) foreseeEmpty(ctx context.Context, m service.Member, have *state.Service) string {
	ns, err := slots.OpenNetns(t.netns, t.id)
	if err != nil {
		return "" // the plan reports it
	}
	defer ns.Close()
	a, err := m.Adopt(ctx, ns, t.service.Spec)
	if err == nil {
		a.Close()
	} else if engine.NotYet(err) {
		if have != nil && m.Slot < len(have.Slots) && have.Slots[m.Slot].Admitted() && (t.empty == nil || t.empty[m.Slot] == nil) {
			return fmt.Sprintf("would stay with %s until its member is there: %v", service.ProcessName(have.Slots[m.Slot].PID), err)
		}
		return "would stay empty: " + err.Error()
	}
	return ""
}

func listens(s spec.Service) string {
	var out []string
	for _, l := range s.Listen {
		out = append(out, l.String())
	}
	return strings.Join(out, ", ")
}

// differences describes the changes to a published service.
func differences(p *record.Service, t target) []string {
	var out []string
	add := func(what string, have, want any) {
		if fmt.Sprint(have) != fmt.Sprint(want) {
			out = append(out, fmt.Sprintf("%s %v → %v", what, have, want))
		}
	}
	have, want := p.Service, t.service
	add("slots", have.Slots, want.Slots)
	add("listen", listens(have), listens(want))
	add("by", have.By, want.By)
	add("on_empty", have.OnEmpty, want.OnEmpty)
	add("foreign", have.Foreign, want.Foreign)
	add("migrate", have.Migrate, want.Migrate)
	add("backlog", *have.Backlog, *want.Backlog)
	add("receive_buffer", *have.ReceiveBuffer, *want.ReceiveBuffer)
	add("copy", cmp.Or(have.Copy, "none"), cmp.Or(want.Copy, "none"))
	add("templates", cmp.Or(have.Templates, spec.TemplatesAuto), want.Templates)
	add("generations", have.Generations, want.Generations)
	add("share_port", have.SharePort, want.SharePort)
	add("weights", have.Weights, want.Weights)
	add("reset_rate", have.ResetRate, want.ResetRate)
	add("quic", have.QUIC, want.QUIC)
	add("devices", spec.FileText(have.Devices, p.Devices), spec.FileText(want.Devices, t.devices.File()))
	if want.Seed != nil {
		add("seed", *have.Seed, *want.Seed)
	}
	if a, b := mustJSON(have.Members), mustJSON(want.Members); a != b {
		out = append(out, "members")
	}
	if p.Netns != t.netns {
		out = append(out, fmt.Sprintf("netns %s → %s", p.Netns, t.netns))
	}
	if t.was != nil && t.moved(p) {
		out = append(out, "devices' slots")
	}
	return out
}

func mustJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain structs: cannot fail
	}
	return string(b)
}
