// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Feature is steering as host sees it.
type Feature struct {
	Hand Hand // of Run: what becomes of sessions before they are reset; nil: nothing
}

var _ feature.Feature[Config, State] = Feature{}

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// Needs implements feature.Feature.
func (Feature) Needs(c Config) []kernel.Need {
	share := kernel.BindShare
	share.Optional = !slices.ContainsFunc(c.Services, func(s Service) bool { return s.SharePort })
	copies := kernel.TCFilter
	copies.Optional = !slices.ContainsFunc(c.Services, func(s Service) bool { return s.Copy != "" })
	return append(engineNeeds(EngineSkLookup), kernel.SkReuseport, kernel.ReuseportArray, GroupPrograms, kernel.PacketFilter, share, copies)
}

// State implements feature.Feature.
func (Feature) State(ctx context.Context, r *kernel.Root) (State, error) { return ReadState(ctx, r) }

// Plan implements feature.Feature.
func (Feature) Plan(ctx context.Context, have State, want Config) (feature.Plan, error) {
	var plan feature.Plan
	for _, o := range have.Outdated {
		plan.Add(upgradeStep(o))
	}
	wanted := map[string]bool{}
	b := &batch{engines: map[string]*engine{}}
	var placed []Service // with the namespace they turned out to be in
	var targets []target
	for _, s := range want.Services {
		ns, _, err := s.FindNetns(ctx)
		if err != nil {
			return plan, fmt.Errorf("services.%s: network namespace: %w", s.Name, err)
		}
		t := newTarget(s, ns)
		ns.Close()
		s.Netns, t.rate, t.batch = t.scope, want.Rate, b
		if err := t.loadDevices(); err != nil {
			return plan, err
		}
		if err := errors.Join(overlaps(placed, s)...); err != nil {
			return plan, err
		}
		placed = append(placed, s)
		wanted[t.scope+"/"+s.Name] = true
		targets = append(targets, t)
	}
	if err := checkLimits(have, targets); err != nil {
		return plan, err
	}
	for _, t := range targets {
		if err := planService(ctx, &plan, have, t); err != nil {
			return plan, err
		}
	}
	for _, s := range have.Services {
		if !wanted[s.scope+"/"+s.Name] {
			plan.Add(b.removal(&s))
			s.removalOutages(&plan)
		}
	}
	b.finish(&plan)
	return plan, nil
}

// target is a service that is wanted, with its namespace resolved.
type target struct {
	service Service
	scope   string
	netns   string // as people know it; what reopens it
	inode   uint64
	devices *DeviceList
	rate    *Rate      // of resets; nil: the service's
	from    *published // what it was in another engine
	held    map[int]heldSlot
	batch   *batch  // nil: alone
	empty   []error // by slot: why the plan says that it will be empty
}

func planService(ctx context.Context, plan *feature.Plan, have State, t target) error {
	i := slices.IndexFunc(have.Services, func(s ServiceState) bool {
		return s.Name == t.service.Name && s.scope == t.scope
	})
	object := "service " + t.service.Name
	if i < 0 {
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "create", Object: object, Detail: fmt.Sprintf("%d slots by %s on %s, in %s",
			t.service.Slots, t.service.By, listens(t.service), t.netns),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", t.publish(ctx, l) }}))
		planMembers(plan, t, nil)
		return nil
	}
	s := have.Services[i]
	kind, _, err := chooseEngine(t.service, s.pub)
	if err != nil {
		return fmt.Errorf("services.%s: %w", t.service.Name, err)
	}
	if err := t.outages(ctx, plan, &s, kind); err != nil {
		return err
	}
	d, change := differences(s.pub, t), t.publish
	if kind != s.Engine && s.Problem != problemEngine {
		d, change = append([]string{fmt.Sprintf("engine %s → %s", s.Engine, kind)}, d...), t.changeEngine
	}
	if s.Problem == problemEngine || s.Problem == problemHolder || s.Problem == problemBind {
		d = append(d, s.Problem)
	}
	if len(d) > 0 {
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "change", Object: object, Detail: strings.Join(d, "; "),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", change(ctx, l) }}))
	}
	planMembers(plan, t, &s)
	s.warn(plan, t)
	return nil
}

// planMembers adds a step for every slot whose member must be looked for.
func planMembers(plan *feature.Plan, t target, have *ServiceState) {
	vet := &vetting{rate: t.rate, limit: underLock} // for all of them: hung checks must not add up
	for _, m := range t.service.Members {
		if have != nil && m.Slot < len(have.Slots) && have.Slots[m.Slot].Admitted() && have.Slots[m.Slot].Member == m.String() {
			continue
		}
		plan.Add(t.batch.step(t.scope, t.service.Name, feature.Step{Verb: "adopt", Object: fmt.Sprintf("slot %d of service %s", m.Slot, t.service.Name), Detail: m.String(),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) {
				slot := Slot{Scope: t.scope, Service: t.service.Name, Slot: m.Slot}
				_, err := t.batch.register(ctx, l, slot, vet)
				remark(l.Root, slot, err)
				if notYet(err) {
					return "stays empty: " + err.Error(), nil
				}
				return "", err
			}}))
	}
}

func listens(s Service) string {
	var out []string
	for _, l := range s.Listen {
		out = append(out, l.String())
	}
	return strings.Join(out, ", ")
}

// differences says in words what would change about a published service.
func differences(p *published, t target) []string {
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
	add("copy", cmp.Or(have.Copy, "nobody"), cmp.Or(want.Copy, "nobody"))
	add("templates", cmp.Or(have.Templates, TemplatesAuto), want.Templates)
	add("generations", have.Generations, want.Generations)
	add("share_port", have.SharePort, want.SharePort)
	add("weights", have.Weights, want.Weights)
	add("reset_rate", have.ResetRate, want.ResetRate)
	add("quic", have.QUIC, want.QUIC)
	add("devices", fileText(have.Devices, p.Devices), fileText(want.Devices, t.devices.file()))
	if want.Seed != nil {
		add("seed", *have.Seed, *want.Seed)
	}
	if a, b := mustJSON(have.Members), mustJSON(want.Members); a != b {
		out = append(out, "members")
	}
	if p.Netns != t.netns {
		out = append(out, fmt.Sprintf("netns %s → %s", p.Netns, t.netns))
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

// Apply implements feature.Feature.
func (Feature) Apply(ctx context.Context, l *kernel.WriteLock, p feature.Plan) error {
	return p.Apply(ctx, l, func(feature.Step, string) {})
}

// publish creates or changes a service.
func (t target) publish(ctx context.Context, l *kernel.WriteLock) error {
	if t.service.SharePort { // before anything changes
		if err := kernel.BindShare.Check(); err != nil {
			return fmt.Errorf("service %s, share_port: %w", t.service.Name, err)
		}
	}
	if t.batch == nil || !t.batch.vetted {
		if err := CleanStale(l); err != nil {
			return err
		}
		if t.batch != nil {
			t.batch.vetted = true
		}
	}
	ns, err := openNetns(t.netns, t.inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	was, err := readService(l.Root, serviceInstance(t.scope, t.service.Name))
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	kind, why, err := chooseEngine(t.service, was)
	if err != nil {
		return err
	}
	e, done, err := t.openEngine(l, ns, kind)
	if err != nil {
		return err
	}
	defer done()
	e.rate, e.coming = t.rate, t.held
	old := e.services[t.service.Name]
	if t.from == nil {
		t.from = was // of the other engine, if it is not old
	}
	p, err := t.next(e, old)
	if err != nil {
		return err
	}
	p.Engine, p.Why = kind, why
	onEmpty := p.Service.OnEmpty
	if len(t.held) > 0 && kind == EngineReuseport {
		p.Service.OnEmpty = Pass // until its members are there: see admitAll
	}
	if err := e.mark(true); err != nil {
		return err
	}
	if err := kernel.Try("steer:marked"); err != nil {
		return err
	}
	if err := e.prepareRows(ctx, p, old, ns); err != nil {
		return err
	}
	if err := kernel.Try("steer:prepared"); err != nil {
		return err
	}
	if p.misplaces(old) {
		if err := e.owe(p, t.rate); err != nil {
			return err
		}
	}
	if err := e.publishService(p); err != nil {
		return err
	}
	if err := kernel.Try("steer:published"); err != nil {
		return err
	}
	if t.batch != nil && e == t.batch.engines[t.scope] {
		return t.afterBatch(e, p)
	}
	if err := e.sync(); err != nil {
		return err
	}
	if err := kernel.Try("steer:synced"); err != nil {
		return err
	}
	if p.Service.OnEmpty != onEmpty {
		if p, err = e.admitAll(ctx, p, onEmpty, ns); err != nil {
			return err
		}
	}
	if err := syncBind(l, p.Service.SharePort); err != nil {
		return err
	}
	// The other service may be the one that is copied, and have come before this one.
	if err := syncCopies(l, t.scope, true); err != nil || kind == EngineSkLookup && p.Service.OnEmpty != Drop {
		return err
	}
	return e.startHolder()
}

// afterBatch is what a service needs before the batch settles.
func (t target) afterBatch(e *engine, p *published) error {
	if p.Service.OnEmpty != Drop {
		return nil
	}
	return e.startHolder()
}

// openEngine opens the engine of the service, makes it where there is none, and upgrades it where it lacks generations.
func (t target) openEngine(l *kernel.WriteLock, ns *netns.Handle, kind Engine) (e *engine, done func(), err error) {
	shared := t.batch != nil && kind == EngineSkLookup
	open := func() (*engine, error) {
		if shared {
			return t.batch.engine(l, t.scope)
		}
		return openEngine(l, t.scope, kind)
	}
	e, err = open()
	if errors.Is(err, kernel.ErrNotExist) {
		if err = publishEngine(l, ns, kind, 0); err != nil {
			return nil, nil, err
		}
		kernel.Step("steer:engine")
		e, err = open()
	}
	if err == nil && t.service.Generations != nil && !e.generational() { // its program is of a weir that had none
		if shared {
			err = t.batch.forget(t.scope)
		} else {
			e.Close()
		}
		if err == nil {
			err = upgradeEngine(l, t.scope, kind)
		}
		if err == nil {
			e, err = open()
		}
	}
	if err != nil {
		return nil, nil, err
	}
	if shared {
		return e, func() {}, nil
	}
	return e, e.Close, nil
}

// next is the published form of t. Slots that stay keep their rows, and so their
// members and counts. Where the endpoints' numbers would mean other sockets to a
// packet that is on its way, everything is new.
func (t target) next(e *engine, old *published) (*published, error) {
	p := &published{Service: t.service, Netns: t.netns}
	if from := t.inherits(old); p.Service.Seed == nil && from != nil {
		p.Service.Seed = from.Service.Seed
	} else if p.Service.Seed == nil {
		p.Service.Seed = randomSeed()
	}
	p.setDevices(t.devices)
	p.shape(t.inherits(old))
	var err error
	if old != nil && sameEndpoints(p, old) {
		p.ID = old.ID
		p.Rows = slices.Clone(old.Rows[:min(len(old.Rows), p.Service.Slots)])
	} else if p.ID, err = e.freeID(); err != nil {
		return nil, err
	} else if err = e.dropDevices(p.ID); err != nil { // of whoever had it, should a killed command have left them
		return nil, err
	}
	more, err := e.freeRows(p.Service.Slots - len(p.Rows))
	p.Rows = append(p.Rows, more...)
	if err != nil {
		return nil, err
	}
	return p, e.spareRows(p, old)
}

func sameEndpoints(a, b *published) bool {
	return slices.Equal(a.Service.Endpoints(), b.Service.Endpoints())
}

// prepareRows adopts the members of slots that get new rows before any packet is
// sent there, so that the change costs nobody a packet. A member that is not
// whole now is looked for again once the service stands.
func (e *engine) prepareRows(ctx context.Context, p, old *published, ns *netns.Handle) error {
	for _, row := range p.Spare {
		if old != nil && slices.Contains(old.Spare, row) {
			continue
		}
		if err := e.clearRow(row, steerSlot{}); err != nil {
			return err
		}
	}
	for slot, row := range p.Rows {
		if old != nil && slices.Contains(old.Rows, row) {
			continue
		}
		var s steerSlot
		if err := e.pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		err := e.clearRow(row, s)
		if err != nil {
			return err
		}
		if old == nil && e.kind == EngineSkLookup {
			err = e.admitHeld(ctx, p, slot, ns)
		}
		if err != nil {
			return err
		}
		if old == nil {
			continue
		}
		if m := e.heir(p, old, slot); m != nil {
			if _, err := e.admit(ctx, p, slot, *m, ns); err != nil && !notYet(err) {
				return err
			}
		}
		if slot < old.Service.Slots {
			if err := e.carryCounts(row, old.row(slot)); err != nil {
				return err
			}
		}
	}
	return nil
}

// carryCounts keeps a slot's counters when it moves to another row, so that
// they only ever rise.
func (e *engine) carryCounts(to, from uint32) error {
	m := e.pins.Maps["verdicts"]
	for proto := range uint32(2) {
		var v []steerVerdicts
		if err := m.Lookup(from*2+proto, &v); err != nil {
			return err
		}
		if err := m.Put(to*2+proto, v); err != nil {
			return err
		}
	}
	return nil
}

func randomSeed() *uint32 {
	var b [4]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	seed := binary.NativeEndian.Uint32(b[:])
	return &seed
}
