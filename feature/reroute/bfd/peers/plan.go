// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// Plan plans the BFD of the whole host: the sessions of wants in their namespaces, and no managed BFD elsewhere.
func Plan(_ context.Context, have State, wants []Config) (plan feature.Plan, err error) {
	plan.Stays(have.Unreadable)
	wanted := map[string]bool{}
	for _, w := range wants {
		ns, err := netns.Open(w.Netns)
		if err != nil {
			return plan, fmt.Errorf("reroute: %w", err)
		}
		scope := strconv.FormatUint(ns.Inode(), 10)
		p := published{Config: w, Netns: cmp.Or(w.Netns, ns.String()), ID: ns.ID()}
		err = ns.Do(func() error {
			w.warnOfEcho(&plan)
			w.warnOfPeers(&plan)
			return nil
		})
		ns.Close()
		if err != nil {
			return plan, err
		}
		wanted[scope] = true
		if have.Unreadable.Has(engine.Published{Scope: scope}.Instance()) {
			continue
		}
		was, has := have.published[scope]
		p.Discriminators = was.Discriminators
		step := feature.Step{Verb: "create", Object: "BFD of " + p.Netns, Detail: summary(w),
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", p.apply(ctx, l) }}
		if has {
			step.Verb, step.Detail = "change", differences(was.Config, w)
			if again := have.again(was.Netns); step.Detail == "" && len(again) > 0 {
				step.Verb, step.Detail = "attach", strings.Join(again, ", ")
			}
		}
		if step.Detail != "" {
			for _, s := range w.Sessions {
				if _, err := s.key(); err != nil { // the step would fail too, but a dry run must report it
					return plan, fmt.Errorf("session %s: %w", s.Name, err)
				}
			}
			plan.Add(step)
		}
	}
	for _, scope := range slices.Sorted(maps.Keys(have.published)) {
		if p := have.published[scope]; !wanted[scope] {
			plan.Add(feature.Step{Verb: "remove", Object: "BFD of " + p.Netns,
				Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", p.remove(ctx, l, scope) }})
		}
	}
	return plan, nil
}

// again lists the sessions of a network namespace with recreated devices.
func (st State) again(ref string) (out []string) {
	for _, s := range st.Sessions {
		if s.again && s.Netns == ref {
			out = append(out, fmt.Sprintf("session %s: %s", s.Name, s.Problem))
		}
	}
	return out
}

// warnOfEcho warns of sessions with echo on a host without forwarding: the neighbour's echo packets would not return,
// and it might not use the link. Forwarding is a setting of the namespace for IPv6, and of the input interface for
// IPv4.
func (c Config) warnOfEcho(plan *feature.Plan) {
	for _, s := range c.Sessions {
		family, of := "ipv6", "all"
		if s.Peer.Is4() {
			family, of = "ipv4", s.Device
		}
		text, err := os.ReadFile("/proc/sys/net/" + family + "/conf/" + of + "/forwarding")
		if s.Echo != 0 && err == nil && strings.TrimSpace(string(text)) == "0" {
			plan.Warn("session %s: echo packets of %s do not return to it, so it may not use the link: enable forwarding on this host: sysctl -w net/%s/conf/%s/forwarding=1", s.Name, s.Peer, family, of)
		}
	}
}

// warnOfPeers warns of missing interfaces and of peers unable to answer: addresses of the namespace itself, and addresses
// outside the device's networks.
func (c Config) warnOfPeers(plan *feature.Plan) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		return
	}
	for _, s := range c.Sessions {
		d, err := net.InterfaceByName(s.Device)
		switch {
		case slices.ContainsFunc(own, func(a net.Addr) bool {
			p, err := netip.ParsePrefix(a.String())
			return err == nil && p.Addr() == s.Peer && !s.Peer.IsLinkLocalUnicast()
		}):
			plan.Warn("session %s: peer: %s is an address of this host: say the neighbour's", s.Name, s.Peer)
		case missing(s.Device):
			plan.Warn("session %s: there is no interface %s: weir serve or weir apply starts the session once it exists", s.Name, s.Device)
		case err == nil && !s.Local.IsValid() && !localTo(d, s.Peer).IsValid():
			plan.Warn("session %s: peer: no address of %s is in the network of %s: the session starts once there is one, or set local", s.Name, s.Device, s.Peer)
		}
	}
	for _, j := range c.Evaluated {
		if missing(j.Device) {
			plan.Warn("path %s: bfd: there is no interface %s: bfdd's session judges it once it exists", j.Name, j.Device)
		}
	}
}

// missing reports that the thread's network namespace lacks an interface.
func missing(device string) bool {
	_, err := netlink.LinkByName(device)
	var none netlink.LinkNotFoundError
	return errors.As(err, &none)
}

func summary(c Config) string {
	out := printable.Count(len(c.Sessions), "session")
	if c.FRR != "" {
		out += ", and bfdd's at " + c.FRR
	}
	return out
}

// differences describes the changes of the configuration; "": none.
func differences(was, want Config) string {
	out := feature.Differences("session", was.Sessions, want.Sessions, func(s Session) string { return s.Name })
	out = append(out, feature.Differences("link judged by FRR", was.Evaluated, want.Evaluated, func(j Evaluated) string { return j.Name })...)
	if was.FRR != want.FRR {
		out = append(out, fmt.Sprintf("frr %q → %q", was.FRR, want.FRR))
	}
	if len(out) == 0 && !reflect.DeepEqual(was, want) {
		out = append(out, "another order")
	}
	return strings.Join(out, ", ")
}

// apply applies the configuration. If it is killed, the next command repeats it, because the recorded configuration
// still differs from the wanted one.
func (p *published) apply(ctx context.Context, l *kernel.WriteLock) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	sessions, err := p.resolve(ns)
	if err != nil {
		return err // before any change
	}
	e, err := engine.OpenWith(ctx, l, ns, p.Config.Tick())
	if err != nil {
		return err
	}
	defer e.Close()
	there, err := e.Sessions()
	if err != nil {
		return err
	}
	was := p.Discriminators
	p.Discriminators = map[string]uint32{}
	stays := map[uint32]bool{}
	p.retain(ns, was, there, sessions, stays)
	was = renamed(was, there, sessions, stays)
	for name, s := range sessions {
		d := was[name]
		if there[d] != s.identity() {
			if s.LinkDown, err = p.foundDown(ns, e, name, d, there); err != nil {
				return err
			}
			sessions[name] = s
			for d = 0; d == 0 || there[d].Ifindex != 0 || stays[d]; d = rand.Uint32() {
			}
		}
		p.Discriminators[name], stays[d] = d, true
	}
	if err := farewell(ctx, ns, e, there, stays); err != nil {
		return err
	}
	for _, s := range p.Config.Sessions {
		x, ready := sessions[s.Name]
		if !ready {
			continue // Run starts it once its device exists
		}
		x.Discriminator = p.Discriminators[s.Name]
		if err := e.PutWith(ctx, l, x.Session); err != nil {
			return fmt.Errorf("session %s: %w", s.Name, err)
		}
	}
	kernel.Step("peers:sessions")
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return e.Record(l, text)
}

// renamed returns the discriminators by the names of sessions. A session belongs to its device and addresses: a new
// name for them continues it, and the neighbour notices nothing. stays are discriminators in use.
func renamed(was map[string]uint32, there map[uint32]engine.Identity, sessions map[string]resolved, stays map[uint32]bool) map[string]uint32 {
	out, former := map[string]uint32{}, map[engine.Identity]uint32{}
	for name, d := range was {
		out[name] = d
		if id, has := there[d]; has && !stays[d] {
			former[id] = d
		}
	}
	for name, s := range sessions {
		if d, has := former[s.identity()]; has {
			out[name] = d
		}
	}
	return out
}

// PlanUpgrade lists the namespaces with programs of another weir version. It changes nothing.
func PlanUpgrade(r *kernel.Root) (plan feature.Plan, err error) {
	all, engines, unreadable, err := readPublished(r)
	if err != nil {
		return plan, err
	}
	plan.Stays(unreadable)
	for _, scope := range slices.Sorted(maps.Keys(all)) {
		if !engines[scope].Other {
			continue
		}
		p := all[scope]
		plan.Add(feature.Step{Verb: "upgrade", Object: "BFD of namespace " + scope, Detail: "programs of another weir version",
			Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) {
				ns, err := netns.Find(p.Netns, p.ID)
				if err != nil {
					return "", err
				}
				defer ns.Close()
				return "", engine.Upgrade(ctx, l, ns, p.Config.Tick())
			}})
	}
	return plan, nil
}

// resolved is a session with its current device.
type resolved struct{ engine.Session }

func (r resolved) identity() engine.Identity {
	return engine.Identity{Ifindex: r.Ifindex, Local: r.Local, Peer: r.Peer}
}

// resolve finds the devices and addresses of sessions, by name. It omits sessions without a device or a local
// address.
func (p *published) resolve(ns *netns.Handle) (map[string]resolved, error) {
	out := map[string]resolved{}
	for _, s := range p.Config.Sessions {
		key, err := s.key()
		if err != nil {
			return nil, fmt.Errorf("session %s: %w", s.Name, err)
		}
		var index int
		local := s.Local
		err = ns.Do(func() error {
			d, err := net.InterfaceByName(s.Device)
			if err != nil {
				return nil // the device may appear later
			}
			index = d.Index
			if !local.IsValid() {
				local = localTo(d, s.Peer)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		if index == 0 || !local.IsValid() {
			continue
		}
		r := resolved{engine.Session{Config: bfd.Config{Multiplier: uint8(s.Multiplier), DesiredTx: s.Interval, RequiredRx: s.Interval, EchoRx: s.Echo, Passive: s.Passive},
			Local: local, Peer: s.Peer, Ifindex: index, Key: key, Echo: s.Echo}}
		if !s.Observe {
			r.Link = index
		}
		out[s.Name] = r
	}
	return out, nil
}

// localTo returns the device's address in a neighbour's network.
func localTo(d *net.Interface, peer netip.Addr) netip.Addr {
	all, _ := d.Addrs() // an error means no address yet
	for _, a := range all {
		n, err := netip.ParsePrefix(a.String())
		if err == nil && n.Contains(peer) {
			return n.Addr()
		}
	}
	return netip.Addr{}
}

// Bounds of the time for telling peers the end of sessions. A session that is down sends once a second.
const (
	minFarewell = 2 * time.Second
	maxFarewell = 10 * time.Second
)

// departure is a session with a farewell in progress.
type departure struct {
	in, out uint64        // packets received and sent before
	told    time.Duration // limit of the farewell if the peer does not answer
}

// farewell ends all sessions except stays, and tells their peers that this is intentional (RFC 5880 section 6.8.16).
// A peer without notice would detect a failure. The farewell ends when the peer confirms it, or after the peer's
// detection time. Packets from before do not count: the peer of a session still coming up may be up by now.
func farewell(ctx context.Context, ns *netns.Handle, e *engine.Engine, there map[uint32]engine.Identity, stays map[uint32]bool) error {
	said, err := departing(ns, e, there, stays)
	if err != nil {
		return err
	}
	// A stalled host sends nothing meanwhile, so each round counts a bounded time.
	const nap, longest = time.Millisecond, 100 * time.Millisecond
	for took := time.Duration(0); len(said) > 0 && ctx.Err() == nil; {
		began := time.Now()
		time.Sleep(nap)
		for d, x := range said {
			st, ok, err := e.Status(d)
			if err != nil || !ok || st.Out > x.out && st.In > x.in && st.Remote.State <= bfd.Down || took >= x.told {
				delete(said, d)
			}
		}
		took += min(time.Since(began), longest)
	}
	maps.DeleteFunc(there, func(d uint32, _ engine.Identity) bool { return stays[d] })
	return e.Delete(slices.Collect(maps.Keys(there))...)
}

// departing shuts down all sessions except stays, if their peers may be up. A session without its interface cannot
// send.
func departing(ns *netns.Handle, e *engine.Engine, there map[uint32]engine.Identity, stays map[uint32]bool) (map[uint32]departure, error) {
	said := map[uint32]departure{}
	for d, id := range there {
		absent := ns.Do(func() error { _, err := netlink.LinkByIndex(id.Ifindex); return err })
		if stays[d] || errors.As(absent, &netlink.LinkNotFoundError{}) {
			continue
		}
		st, ok, err := e.Status(d)
		if err != nil {
			return nil, err
		}
		if ok && (st.State == bfd.Up || st.State == bfd.Init) {
			said[d] = departure{st.In, st.Out, min(max(st.Awaited, minFarewell), maxFarewell)}
			if err := e.Down(d); err != nil {
				return nil, err
			}
		}
	}
	return said, nil
}

// remove ends all sessions of a namespace.
func (p *published) remove(ctx context.Context, l *kernel.WriteLock, scope string) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err == nil {
		defer ns.Close()
		err = silence(ctx, l, ns, p)
	}
	if errors.Is(err, netns.ErrGone) {
		err = nil // the sessions are gone with it
	}
	// Remove even if the peers could not be told.
	return errors.Join(err, engine.RemoveScope(l, scope), liveness.DropLoops(l, scope))
}

func silence(ctx context.Context, l *kernel.WriteLock, ns *netns.Handle, p *published) error {
	e, err := engine.OpenWith(ctx, l, ns, p.Config.Tick())
	if err != nil {
		return err
	}
	defer e.Close()
	there, err := e.Sessions()
	if err != nil {
		return err
	}
	return farewell(ctx, ns, e, there, nil)
}

// Remove removes the BFD of all namespaces, including unmanaged engines.
func Remove(ctx context.Context, l *kernel.WriteLock) error {
	all, _, _, err := readPublished(l.Root)
	if err != nil {
		return errors.Join(err, engine.Remove(l))
	}
	var errs []error
	for scope, p := range all {
		errs = append(errs, p.remove(ctx, l, scope))
	}
	return errors.Join(append(errs, engine.Remove(l))...)
}
