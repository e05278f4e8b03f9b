// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/lb/forwarding"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/secret"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Name is the feature's name: configuration key and CLI noun.
const Name = spec.Name

// Feature is the load balancer. weir apply records the section for the network namespace of the command. weir serve runs the agent there.
type Feature struct{}

var (
	_ feature.Feature[Config, State] = Feature{}
	_ feature.Sectioned              = Feature{}
	_ feature.Runner                 = Feature{}
	_ feature.Upgrader               = Feature{}
	_ feature.Restorer               = Feature{}
	_ feature.Measured               = Feature{}
	_ feature.Examiner               = Feature{}
	_ feature.Recoverer              = Feature{}
	_ feature.Reporter               = Feature{}
	_ feature.Privileged             = Feature{}
	_ feature.AgentPins              = Feature{}
	_ feature.RemovePlanner          = Feature{}
	_ feature.Explainer              = Feature{}
)

var applied = feature.Applied[Config]{Feature: Name}

// State is the applied configuration of this network namespace and the load balancers pinned in it.
type State struct {
	Spec       *Config              `json:"spec"`                 // nil: none
	Unreadable instances.Unreadable `json:"unreadable,omitempty"` // of all network namespaces
	pinned     []kernel.Instance    // in this network namespace
	root       *kernel.Root
	failures   []feature.Finding // of all network namespaces
}

// Failures implements feature.Failing: missing network namespaces, and devices without the load balancer's program.
func (st State) Failures() []feature.Finding { return st.failures }

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Err is an error about unreadable load balancers, nil if all are readable. Damaged ones are left to the host's faults.
func (s State) Err() error { return s.Unreadable.WithoutDamage().Err() }

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// MapPrefixes implements feature.Mapped.
func (Feature) MapPrefixes() []string { return []string{"lb_", "quarantine_"} }

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) ([]string, bool) { return spec.PinnedMaps(i) }

// Section implements feature.Sectioned.
func (Feature) Section() any { return &Config{Name: Name} }

// Spec implements feature.Feature: the section of the file.
func (Feature) Spec(d *feature.Document) (Config, bool) {
	return feature.Section[Config](d.Sections, Name)
}

// Listens implements feature.Listener: the address for backends' agents.
func (Feature) Listens(c Config) []feature.Listen { return []feature.Listen{listens(&c)} }

func listens(c *Config) feature.Listen {
	return feature.Listen{Pos: c.Pos, Section: Name, Address: c.Listen}
}

// Needs implements feature.Feature. The needs are optional if the file has no load balancer.
func (Feature) Needs(c Config) []kernel.Need {
	needs := slices.Clone(Needs)
	for i := range needs {
		if !c.Declared() {
			needs[i].Optional, needs[i].For = true, "a load balancer (lb in weir.yaml)"
		}
	}
	return needs
}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{{Capability: unix.CAP_NET_RAW, For: "packet buffering (handoff/packetbuf)"}}
}

// State implements feature.Feature.
func (Feature) State(_ context.Context, r *kernel.Root) (s State, err error) {
	s.root = r
	if s.Spec, s.Unreadable, err = applied.State(r); err != nil {
		return s, err
	}
	ns, err := netns.Current()
	if err != nil {
		return s, err
	}
	defer ns.Close()
	if s.Spec != nil {
		s.failures = listens(s.Spec).Failures("load balancer " + s.Spec.Name)
	}
	all, err := Instances(r)
	if err != nil {
		return s, err
	}
	for _, i := range all {
		x := Status{Name: strings.TrimPrefix(i.Name, spec.PinPrefix), Netns: i.Scope, Gone: gone(r, i), Devices: deviceFaults(r, i)}
		s.failures = append(s.failures, x.Findings()...)
	}
	s.pinned = slices.DeleteFunc(all, func(i kernel.Instance) bool { return i.Scope != kernel.ScopeOf(ns) })
	_, unread, err := store.All(r)
	s.Unreadable = append(s.Unreadable, unread...)
	return s, err
}

// Plan implements feature.Feature.
func (Feature) Plan(ctx context.Context, have State, want Config) (p feature.Plan, err error) {
	p.Stays(have.Unreadable)
	if stays, err := have.stays(); stays || err != nil {
		return p, err
	}
	if want.Declared() {
		_, running := have.instance(want.Name)
		if err := ready(&p, &want, running); err != nil {
			return p, err
		}
		have.detached(&p, want.Name)
		have.listens(&p, &want)
	}
	switch {
	case have.Spec != nil && (!want.Declared() || want.Name != have.Spec.Name):
		have.remove(&p, have.Spec.Name)
	case have.Spec != nil && applied.Same(have.Spec, &want):
		return p, nil
	}
	if want.Declared() {
		verb, detail := "create", printable.Count(len(want.Services), "service")+", "+printable.Count(len(want.Backends), "backend")
		if have.Spec != nil && want.Name == have.Spec.Name {
			verb, detail = "change", have.Spec.Changes(&want)
			if err := have.outages(ctx, &p, &want); err != nil {
				return p, err
			}
		}
		p.Add(feature.Step{Verb: verb, Object: "load balancer " + want.Name, Detail: detail,
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", applied.Publish(l, want) }})
	}
	return p, nil
}

// stays reports whether the load balancer of this network namespace is unreadable and therefore left alone.
func (s State) stays() (bool, error) {
	for _, i := range s.pinned {
		if s.Unreadable.WithoutDamage().Has(i) {
			return true, nil
		}
	}
	return applied.Stays(s.Unreadable)
}

// ready rejects an unusable certificate and warns of missing interfaces. Credentials are readable in the agent's unit
// alone. running: the load balancer already exists.
func ready(p *feature.Plan, c *Config, running bool) error {
	if _, err := c.TLS.LoadFor(c.Name); errors.Is(err, secret.ErrNoCredentials) {
		p.Warn("lb.tls is checked by weir serve, not by this command: %v", err)
	} else if err != nil {
		return c.Pos.Errorf("lb.tls: %w", err)
	}
	until := "the load balancer starts when it appears"
	if running {
		until = "the load balancer works without it until it appears"
	}
	for _, d := range c.Devices {
		if _, err := net.InterfaceByName(d); err != nil {
			p.Warn("lb: there is no interface %s: %s", d, until)
		}
	}
	return nil
}

// listens warns if agents cannot connect to the listen address.
func (s State) listens(p *feature.Plan, c *Config) {
	was := ""
	if s.Spec != nil {
		was = s.Spec.Listen
	}
	listens(c).Await(p, was)
}

// detached warns of existing devices without the load balancer's program. The agent attaches it.
func (s State) detached(p *feature.Plan, name string) {
	i, _ := s.instance(name)
	for _, d := range deviceFaults(s.root, i) {
		if !d.Absent {
			p.Warn("lb: %s: %s: %s", d.Device, d.Reason, feature.DeviceRemedy)
		}
	}
}

// PlanRemove implements feature.RemovePlanner: the load balancers of all network namespaces.
func (Feature) PlanRemove(_ context.Context, r *kernel.Root) (p feature.Plan, err error) {
	all, err := Instances(r)
	for _, i := range all {
		ns, e := r.OpenNetns(i)
		if errors.Is(e, netns.ErrGone) {
			continue // only pins are left
		} else if e == nil {
			ns.Close()
		}
		p.Outage("lb: load balancer %s of namespace %s %s", strings.TrimPrefix(i.Name, spec.PinPrefix), i.Scope, spreadsNow)
	}
	return p, err
}

// PlanRemoveHere plans the removal of a load balancer of this network namespace. An empty name means the only one. It is no error
// if there is none.
func PlanRemoveHere(ctx context.Context, r *kernel.Root, name string) (p feature.Plan, err error) {
	st, err := Feature{}.State(ctx, r)
	if err != nil {
		return p, err
	}
	if name == "" && len(st.pinned) == 0 && st.Spec != nil {
		name = st.Spec.Name
	} else if name == "" {
		if name, err = onlyName(st.pinned); err != nil {
			return p, err
		}
	}
	_, pinned := st.instance(name)
	switch {
	case pinned, st.Spec != nil && st.Spec.Name == name:
		st.remove(&p, name)
	case len(st.pinned) > 0:
		return p, errOther(name, st.pinned)
	}
	return p, nil
}

func (s State) remove(p *feature.Plan, name string) {
	if _, pinned := s.instance(name); pinned {
		p.Outage("lb: load balancer %s %s", name, spreadsNow)
	}
	p.Add(feature.Step{Verb: "remove", Object: "load balancer " + name, Do: func(_ context.Context, l *kernel.WriteLock) (string, error) {
		ns, err := netns.Current()
		if err != nil {
			return "", err
		}
		defer ns.Close()
		return "", removeIn(l, ns, name)
	}})
}

const spreadsNow = "spreads traffic now; without it traffic follows the kernel's routes"

// removeIn removes the data path and the spec of a network namespace. The data path goes first, so a command after a kill starts over.
func removeIn(l *kernel.WriteLock, ns *netns.Handle, name string) error {
	return ns.Do(func() error {
		spec, err := applied.Read(l.Root)
		if err != nil {
			return err
		}
		if err := remove(l, instanceKey(ns, name), ns); err != nil {
			return err
		}
		kernel.Step("lb:removed")
		if spec == nil || spec.Name != name {
			return nil
		}
		return applied.Remove(l)
	})
}

// Remove implements feature.Feature: the load balancers of all network namespaces.
func (Feature) Remove(_ context.Context, l *kernel.WriteLock) error {
	err := errors.Join(removeAll(l), applied.RemoveAll(l))
	store.ForgetDamaged(l)
	control.Sweep()
	return err
}

// Recover implements feature.Recoverer. It removes load balancers of missing network namespaces.
func (Feature) Recover(l *kernel.WriteLock) error {
	defer control.Sweep()
	return errors.Join(store.RemoveGone(l), applied.RemoveGone(l))
}

// Run implements feature.Runner: the agent.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return feature.Agent[Config]{Applied: applied, Start: Run}.Run(ctx, r, log)
}

// Save implements feature.Restorer: the spec, null for none.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	c, _, err := applied.State(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(c)
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (feature.Plan, error) {
	var was Config
	if err := json.Unmarshal(saved, &was); err != nil {
		return feature.Plan{}, fmt.Errorf("read the saved load balancer: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return feature.Plan{}, err
	}
	return f.Plan(ctx, have, was)
}

// Report is the load balancers' part of weir status.
type Report struct {
	Balancers  []Status             `json:"balancers"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`
}

// Err is an error about unreadable load balancers, nil if all are readable.
func (r Report) Err() error { return r.Unreadable.WithoutDamage().Err() }

// Empty implements feature.Emptier.
func (r Report) Empty() bool { return len(r.Balancers)+len(r.Unreadable) == 0 }

// Report implements feature.Reporter: the load balancers of all network namespaces, as reported by their agents. Without an agent
// it reads the pins.
func (f Feature) Report(ctx context.Context, r *kernel.Root, _ []kernel.Fault) (any, error) {
	st, err := f.State(ctx, r)
	all, aerr := Statuses(ctx, r)
	return Report{Balancers: all, Unreadable: st.Unreadable}, errors.Join(err, aerr)
}

// Examine implements feature.Examiner: missing network namespaces, unreachable agents, certificates near expiry.
func (f Feature) Examine(ctx context.Context, r *kernel.Root) (out []feature.Finding, err error) {
	st, serr := f.State(ctx, r)
	all, err := Statuses(ctx, r)
	out = feature.UnreadFindings(st.Unreadable)
	if st.Spec != nil {
		out = append(out, listens(st.Spec).Failures("load balancer "+st.Spec.Name)...)
		out = append(out, forwarding.Findings(st.Spec)...)
	}
	answers := map[string]bool{}
	for _, s := range all {
		answers[s.Name] = answers[s.Name] || s.Agent
		out = append(out, s.Findings()...)
	}
	if st.Spec != nil && !answers[st.Spec.Name] {
		out = append(out, feature.Finding{Object: "load balancer " + st.Spec.Name, Text: "its agent does not answer: no session moves, and no backend is checked",
			Remedy: "run weir serve, or weir serve --only lb, in this network namespace; its log says why the agent does not start"})
	}
	return out, errors.Join(err, serr)
}

// AgentPins implements feature.AgentPins.
func (Feature) AgentPins() string { return store.Feature }
