// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/secret"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Name is the feature's name.
const Name = "backend"

// Feature is a backend of a load balancer, seen from the backend. weir apply records the section for the network
// namespace of the command. weir serve runs the agent there.
type Feature struct{}

var (
	_ feature.Feature[Config, State] = Feature{}
	_ feature.Sectioned              = Feature{}
	_ feature.Nested                 = Feature{}
	_ feature.Runner                 = Feature{}
	_ feature.Upgrader               = Feature{}
	_ feature.Restorer               = Feature{}
	_ feature.Measured               = Feature{}
	_ feature.Examiner               = Feature{}
	_ feature.Recoverer              = Feature{}
	_ feature.Reporter               = Feature{}
	_ feature.Privileged             = Feature{}
	_ feature.RemovePlanner          = Feature{}
	_ feature.KeeperUser             = Feature{}
	_ feature.Explainer              = Feature{}
)

var applied = feature.Applied[Config]{Feature: Name}

// State is the applied configuration of this network namespace.
type State struct {
	Spec       *Config              `json:"spec"`                 // nil: none
	Unreadable instances.Unreadable `json:"unreadable,omitempty"` // of all network namespaces

	root     *kernel.Root
	failures []feature.Finding // of all network namespaces
}

// Failures implements feature.Failing: missing network namespaces, and devices without the quarantine's programs.
func (st State) Failures() []feature.Finding { return st.failures }

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Err is an error about unreadable backends, nil if all are readable. Damaged ones are left to the host's faults.
func (s State) Err() error { return s.Unreadable.WithoutDamage().Err() }

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	return quarantine.PinnedMaps(i)
}

// Under implements feature.Nested.
func (Feature) Under() string { return "handoff" }

// Section implements feature.Sectioned.
func (Feature) Section() any { return &Config{} }

// Spec implements feature.Feature: the section of the file.
func (Feature) Spec(d *feature.Document) (Config, bool) {
	return feature.Section[Config](d.Sections, Name)
}

// Listens implements feature.Listener: the address for other backends' agents.
func (Feature) Listens(c Config) []feature.Listen { return []feature.Listen{listens(&c)} }

func listens(c *Config) feature.Listen {
	return feature.Listen{Pos: c.Pos, Section: "handoff.backend", Address: c.Listen}
}

// Needs implements feature.Feature. The needs are optional if the file has no backend.
func (Feature) Needs(c Config) []kernel.Need {
	tcx := kernel.TCXLink
	tcx.For = "a backend (handoff.backend in weir.yaml); without it, tc filters are used"
	needs := []kernel.Need{tcx}
	for _, n := range repair.Needs() {
		n.Optional = n.Optional || !c.declared()
		needs = append(needs, n)
	}
	return needs
}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{{Capability: unix.CAP_NET_RAW, For: "packet buffering (handoff/packetbuf), retransmission after a move (handoff/repair)"}}
}

// State implements feature.Feature.
func (Feature) State(_ context.Context, r *kernel.Root) (s State, err error) {
	s.root = r
	if s.Spec, s.Unreadable, err = applied.State(r); err != nil {
		return s, err
	}
	all, unread, err := quarantine.Store.All(r)
	s.Unreadable = append(s.Unreadable, unread...)
	s.failures = quarantine.Failures(all, r)
	if s.Spec != nil {
		s.failures = append(s.failures, listens(s.Spec).Failures("backend "+s.Spec.Name)...)
	}
	gone, _ := applied.Gone(r) // namespaces not accessible to this user are skipped
	for _, rec := range gone {
		s.failures = append(s.failures, feature.Failure("backend "+rec.Spec.Name, fmt.Sprintf("its network namespace net:[%s] is gone", rec.Scope), feature.RemedyGone))
	}
	return s, err
}

// Plan implements feature.Feature.
func (Feature) Plan(ctx context.Context, have State, want Config) (p feature.Plan, err error) {
	p.Stays(have.Unreadable)
	if stays, err := have.stays(); stays || err != nil {
		return p, err
	}
	if want.declared() {
		if err := want.ready(&p); err != nil {
			return p, err
		}
		have.listens(&p, &want)
		have.loopback(&p, &want)
		if err := have.detached(&p); err != nil {
			return p, err
		}
	}
	switch {
	case have.Spec == nil && !want.declared(), have.Spec != nil && applied.Same(have.Spec, &want):
	case !want.declared():
		err = have.remove(ctx, &p)
	default:
		verb := "change"
		if have.Spec == nil {
			verb = "create"
		} else if err := have.outages(ctx, &p, &want); err != nil {
			return p, err
		}
		p.Add(feature.Step{Verb: verb, Object: "backend " + want.Name, Detail: fmt.Sprintf("number %d, of the load balancer at %s", want.Number, want.LB.Address),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", applied.Publish(l, want) }})
	}
	return p, err
}

// stays reports whether the backend of this network namespace must not change, because it or its quarantine is
// unreadable.
func (s State) stays() (bool, error) {
	ns, err := netns.Current()
	if err != nil {
		return false, err
	}
	defer ns.Close()
	if s.Unreadable.WithoutDamage().Has(quarantine.Instance(ns)) {
		return true, nil
	}
	return applied.Stays(s.Unreadable)
}

// declared reports whether the file has the section.
func (c *Config) declared() bool { return c.Name != "" }

// ready rejects an unusable certificate, and warns about missing interfaces. Credentials are readable in the agent's unit
// alone.
func (c *Config) ready(p *feature.Plan) error {
	if _, err := c.TLS.LoadFor(c.Name); errors.Is(err, secret.ErrNoCredentials) {
		p.Warn("handoff.backend.tls is checked by weir serve, not by this command: %v", err)
	} else if err != nil {
		return c.Pos.Errorf("handoff.backend.tls: %w", err)
	}
	for _, d := range c.Devices {
		if _, err := net.InterfaceByName(d); err != nil {
			p.Warn("handoff.backend: interface %s is missing: the backend starts once it exists", d)
		}
	}
	return nil
}

// loopback rejects the loopback among the devices. An existing backend keeps it, with a warning, because earlier
// versions accepted it.
func (s State) loopback(p *feature.Plan, c *Config) {
	switch {
	case !slices.Contains(c.Devices, loopback):
	case s.Spec != nil && slices.Contains(s.Spec.Devices, loopback):
		p.Warn("handoff.backend: devices: %q: %s", loopback, loopbackText)
	default:
		p.Outage("%v", c.Errorf("handoff.backend: devices: %q: %s", loopback, loopbackText))
	}
}

const (
	loopback     = "lo"
	loopbackText = "the load balancer's packets do not use the loopback, and sessions of local clients do not move: remove it"
)

// listens warns about an unusable listen address: no agent could connect there.
func (s State) listens(p *feature.Plan, c *Config) {
	was := ""
	if s.Spec != nil {
		was = s.Spec.Listen
	}
	listens(c).Await(p, was)
}

// detached warns about devices without the quarantine's programs in this network namespace. The agent attaches them.
func (s State) detached(p *feature.Plan) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	for _, d := range quarantine.DeviceFaults(s.root, quarantine.Instance(ns)) {
		if !d.Absent {
			p.Warn("handoff.backend: %s: %s: %s", d.Device, d.Reason, feature.DeviceRemedy)
		}
	}
	return nil
}

// removeHere removes the quarantine and the spec of this network namespace. The quarantine goes first: after a kill
// in between, the next command starts over.
func removeHere(l *kernel.WriteLock) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := quarantine.Remove(l, ns); err != nil {
		return err
	}
	kernel.Step("backend:removed")
	defer control.Clear(controlName(ns))
	return applied.Remove(l)
}

// Explain implements feature.Explainer: the packet's tunnel, and the quarantine of its session.
func (Feature) Explain(_ context.Context, r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	out, err := tunnel.Explain(p)
	if err != nil {
		return nil, err
	}
	more, err := quarantine.Explain(r, p)
	return append(out, more...), err
}

// Remove implements feature.Feature: it removes the quarantines of all network namespaces.
func (Feature) Remove(_ context.Context, l *kernel.WriteLock) error {
	all, err := quarantine.Store.Keys(l.Root)
	err = errors.Join(err, quarantine.RemoveAll(l), applied.RemoveAll(l))
	quarantine.Store.ForgetDamaged(l)
	for _, i := range all {
		control.Clear(controlNameOf(i.Scope))
	}
	control.Sweep()
	return err
}

// Recover implements feature.Recoverer: it removes quarantines and specs of gone network namespaces.
func (Feature) Recover(l *kernel.WriteLock) error {
	defer control.Sweep()
	return errors.Join(quarantine.Store.RemoveGone(l), applied.RemoveGone(l))
}

// Run implements feature.Runner: the agent.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return runner{}.Run(ctx, r, log)
}

// WithKeeper implements feature.KeeperUser.
func (Feature) WithKeeper(socket string) feature.Runner { return runner{keeper: socket} }

// runner runs the agent with a keeper's socket. The file may override it.
type runner struct{ keeper string }

// Run implements feature.Runner.
func (r runner) Run(ctx context.Context, root *kernel.Root, log feature.Logger) error {
	return feature.Agent[Config]{Applied: applied, Start: func(ctx context.Context, root *kernel.Root, c *Config, log *slog.Logger) error {
		spec := *c
		spec.Keeper = cmp.Or(c.Keeper, r.keeper)
		return start(ctx, root, &spec, log)
	}}.Run(ctx, root, log)
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
		return feature.Plan{}, fmt.Errorf("parse the saved backend: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return feature.Plan{}, err
	}
	return f.Plan(ctx, have, was)
}

// Report is the output of weir status for this network namespace.
type Report struct {
	Spec  *Config `json:"spec"`
	Agent *Status `json:"agent"` // nil: it does not answer

	Unreadable instances.Unreadable `json:"unreadable,omitempty"` // of all network namespaces
}

// Err is an error about unreadable backends, nil if all are readable.
func (r Report) Err() error { return r.Unreadable.WithoutDamage().Err() }

// Empty implements feature.Emptier.
func (r Report) Empty() bool { return r.Spec == nil && len(r.Unreadable) == 0 }

// Report implements feature.Reporter.
func (f Feature) Report(ctx context.Context, r *kernel.Root, _ []kernel.Fault) (any, error) {
	st, err := f.State(ctx, r)
	out := Report{Spec: st.Spec, Unreadable: st.Unreadable}
	if err != nil || st.Spec == nil {
		return out, err
	}
	if s, err := StatusHere(ctx); err == nil { // otherwise the state has the failure
		out.Agent = &s
	}
	return out, nil
}

// certificateNear is the time before a certificate's expiry from which it is reported.
const certificateNear = 7 * 24 * time.Hour

// Examine implements feature.Examiner: a gone network namespace, conntrack problems, an agent without an answer or
// connections, an expiring certificate.
func (f Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, serr := f.State(ctx, r)
	more, err := examine(r)
	spec, out := st.Spec, slices.Concat(st.Failures(), feature.UnreadFindings(st.Unreadable), more)
	if spec == nil {
		return out, errors.Join(err, serr)
	}
	object := "backend " + spec.Name
	s, aerr := StatusHere(ctx)
	if aerr != nil {
		out = append(out, feature.Finding{Object: object, Text: "its agent does not answer, no session can move: " + aerr.Error(),
			Remedy: "run weir serve, or weir serve --only backend, in this network namespace; its log has the reason if the agent does not start"})
	} else {
		out = append(out, examineAgent(object, s)...)
	}
	if c := s.Certificate; c != nil && c.Problem != "" {
		out = append(out, feature.Finding{Object: object, Text: "the new certificate is rejected, the previous one stays in use: " + c.Problem, Remedy: "fix the files of handoff.backend.tls"})
	} else if c != nil && time.Until(c.NotAfter) < certificateNear {
		out = append(out, feature.Finding{Object: object, Text: "the certificate expires at " + c.NotAfter.UTC().Format(time.RFC3339), Remedy: "replace the files of handoff.backend.tls"})
	}
	return out, errors.Join(err, serr)
}

// AgentPins implements feature.AgentPins.
func (Feature) AgentPins() string { return quarantine.Store.Feature }

// PlanUpgrade implements feature.Upgrader for the programs of the quarantines.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	return quarantine.PlanUpgrade(r)
}
