// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"cmp"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// Config is the section reroute of a configuration: links, their failure detection, and their repairs.
type Config struct {
	Paths []Path
}

// Path is a link, or some destinations behind it. One of a link's paths has the probe, and its verdict is for all.
type Path struct {
	protect.Path `yaml:",inline"`
	Prefix       netip.Prefix `yaml:"prefix"`   // short form of prefixes: [it]
	Segments     []netip.Addr `yaml:"segments"` // short form of repairs: [{segments: it}]
	Probe        *Probe       `yaml:"probe"`    // absent: the link is judged by its carrier alone, or by BFD
	BFD          *BFD         `yaml:"bfd"`      // in place of a probe, for a neighbour without weir
	// FRR is the address of a bfdd (its --dplaneaddr) with sessions for the kernel. The path has no link then.
	FRR string `yaml:"frr"`
}

// BFD judges a link by a BFD session with its neighbour (RFC 5881).
type BFD struct {
	strictyaml.Pos `yaml:"-"`
	Peer           netip.Addr    `yaml:"peer"`
	Local          netip.Addr    `yaml:"local"`                     // absent: the interface's address in the peer's network
	Interval       time.Duration `yaml:"interval" zero:"default"`   // absent: 50 ms; the slower end decides
	Multiplier     int           `yaml:"multiplier" zero:"default"` // absent: 3
	Echo           time.Duration `yaml:"echo"`                      // absent: no echo packets
	Passive        bool          `yaml:"passive"`
	KeyFile        string        `yaml:"key_file" path:"file"` // absent: no authentication
	KeyID          int           `yaml:"key_id"`
	Auth           peers.Auth    `yaml:"auth"`    // absent: meticulous-sha1
	Observe        bool          `yaml:"observe"` // judge the link without rerouting
	// FRR selects a session handed over by bfdd (Path.FRR), with bfdd's configuration.
	FRR bool `yaml:"frr"`
}

// defaultBFDInterval is supported by most routers.
const defaultBFDInterval = 50 * time.Millisecond

func (p *Path) neighbour() peers.Session {
	o := p.BFD
	return peers.Session{Name: p.Name, Device: p.Device, Peer: o.Peer, Local: o.Local, Interval: cmp.Or(o.Interval, defaultBFDInterval),
		Multiplier: cmp.Or(o.Multiplier, defaultMultiplier), Echo: o.Echo, Passive: o.Passive, KeyFile: o.KeyFile, KeyID: o.KeyID, Auth: o.Auth, Observe: o.Observe}
}

// neighbours returns the configuration for package peers, by network namespace.
func (c *Config) neighbours() (out []peers.Config) {
	of := func(netns string) *peers.Config {
		at := slices.IndexFunc(out, func(o peers.Config) bool { return o.Netns == netns })
		if at < 0 {
			at = len(out)
			out = append(out, peers.Config{Netns: netns})
		}
		return &out[at]
	}
	for i := range c.Paths {
		p := &c.Paths[i]
		if p.BFD != nil {
			if o := of(p.Netns); p.BFD.FRR {
				o.Evaluated = append(o.Evaluated, peers.Evaluated{Name: p.Name, Device: p.Device, Peer: p.BFD.Peer})
			} else {
				o.Sessions = append(o.Sessions, p.neighbour())
			}
		}
		if p.FRR != "" {
			of(p.Netns).FRR = p.FRR
		}
	}
	return out
}

// Probe configures the probes of a link.
type Probe struct {
	strictyaml.Pos `yaml:"-"`
	ID             uint32        `yaml:"id"`                        // the same at both ends
	Mode           liveness.Mode `yaml:"mode"`                      // absent: active
	Peer           netip.Addr    `yaml:"peer"`                      // the peer's segment
	Via            netip.Addr    `yaml:"via"`                       // absent: peer
	Source         netip.Addr    `yaml:"source"`                    // our address for returning answers
	Function       netip.Addr    `yaml:"function"`                  // our segment for the peer's probes
	Interval       time.Duration `yaml:"interval" zero:"default"`   // absent: 10 ms
	Multiplier     int           `yaml:"multiplier" zero:"default"` // absent: 3
	Grace          time.Duration `yaml:"grace" zero:"default"`
	StableFor      time.Duration `yaml:"stable_for" zero:"default"`
	StableMax      time.Duration `yaml:"stable_max" zero:"default"`
	KeyFile        string        `yaml:"key_file" path:"file"`
	Observe        bool          `yaml:"observe"` // judge the link without rerouting
}

// Defaults of a probe: down after three unanswered probes of 10 ms.
const (
	defaultInterval   = 10 * time.Millisecond
	defaultMultiplier = 3
)

func (p *Path) session() liveness.Session {
	o := p.Probe
	return liveness.Session{Name: p.Name, ID: o.ID, Mode: o.Mode, Device: p.Device, Peer: o.Peer, Via: o.Via, Source: o.Source, Function: o.Function,
		Interval: cmp.Or(o.Interval, defaultInterval), Multiplier: cmp.Or(o.Multiplier, defaultMultiplier), Grace: o.Grace,
		StableFor: o.StableFor, StableMax: o.StableMax, KeyFile: o.KeyFile, Observe: o.Observe}
}

// protected returns the path in the long form; false: it has no repair.
func (p *Path) protected() (protect.Path, bool) {
	out := p.Path
	if p.Prefix.IsValid() {
		out.Prefixes = []netip.Prefix{p.Prefix}
	}
	if len(p.Segments) > 0 {
		out.Repairs = []protect.Repair{{Segments: p.Segments}}
	}
	return out, len(out.Repairs) > 0
}

// protection returns the configuration for package protect.
func (c *Config) protection() (out protect.Config) {
	for i := range c.Paths {
		if p, ok := c.Paths[i].protected(); ok {
			out.Paths = append(out.Paths, p)
		}
	}
	return out
}

// liveness returns the configuration for package liveness, by network namespace. BFD uses its timer loops.
func (c *Config) liveness() (out []liveness.Config) {
	for _, n := range c.neighbours() {
		out = append(out, liveness.Config{Netns: n.Netns, Tick: n.Tick()})
	}
	for i := range c.Paths {
		p := &c.Paths[i]
		if p.Probe == nil {
			continue
		}
		at := slices.IndexFunc(out, func(l liveness.Config) bool { return l.Netns == p.Netns })
		if at < 0 {
			at = len(out)
			out = append(out, liveness.Config{Netns: p.Netns})
		}
		out[at].Sessions = append(out[at].Sessions, p.session())
	}
	return out
}

// Validate checks values beyond their types. Each error carries its position in the file.
func (c *Config) Validate() []error {
	var errs []error
	names := map[[2]string]bool{} // true: all paths with the name are protected
	for i := range c.Paths {
		p := &c.Paths[i]
		errs = append(errs, p.check()...)
		key := [2]string{p.Netns, p.Name}
		_, protected := p.protected()
		all, taken := names[key]
		if taken && !(all && protected) { // otherwise package protect reports it
			errs = append(errs, p.Path.Errorf("reroute.%s: two paths have this name", p.Name))
		}
		names[key] = protected && (all || !taken)
	}
	frr := map[string]string{}
	for i := range c.Paths {
		p := &c.Paths[i]
		if other, taken := frr[p.Netns]; p.FRR != "" && taken {
			errs = append(errs, p.Path.Errorf("reroute.%s: %s configures the bfdd of this network namespace already", p.Name, other))
		} else if p.FRR != "" {
			frr[p.Netns] = p.Name
		}
	}
	judges := map[[2]string]string{}
	for i := range c.Paths {
		p := &c.Paths[i]
		if p.BFD != nil && p.BFD.FRR && frr[p.Netns] == "" {
			errs = append(errs, p.BFD.Errorf("reroute.%s.bfd: frr: the address of the bfdd of this network namespace is missing: add - {name: frr, frr: \"unix:/run/frr/bfd-dplane\"}", p.Name))
		}
		if p.BFD == nil || p.BFD.Observe {
			if p.Probe == nil || p.Probe.Observe {
				continue
			}
		}
		link := [2]string{p.Netns, p.Device}
		if other, taken := judges[link]; taken && p.BFD != nil {
			errs = append(errs, p.BFD.Errorf("reroute.%s.bfd: %s judges interface %s already: set observe: true here or there", p.Name, other, p.Device))
		}
		judges[link] = p.Name
	}
	protection := c.protection()
	errs = append(errs, protection.Validate()...)
	if len(errs) > 0 {
		return errs
	}
	// Check the paths together; each is valid on its own.
	for _, l := range c.liveness() {
		for _, err := range l.Validate() {
			errs = append(errs, c.Paths[0].Path.Errorf("reroute: %w", err))
		}
	}
	return errs
}

// check validates one path.
func (p *Path) check() (errs []error) {
	fail := func(format string, a ...any) {
		errs = append(errs, p.Path.Errorf("reroute.%s: "+format, append([]any{p.Name}, a...)...))
	}
	if p.Prefix.IsValid() && len(p.Prefixes) > 0 {
		fail("prefix and prefixes: use one of the two")
	}
	if len(p.Segments) > 0 && len(p.Repairs) > 0 {
		fail("segments and repairs: use one of the two; a repair has its own segments")
	}
	if p.FRR != "" {
		return p.checkFRR()
	}
	if p.Probe != nil && p.BFD != nil {
		fail("probe and bfd: use one of the two")
	}
	_, protected := p.protected()
	if !protected && p.Probe == nil && p.BFD == nil {
		fail("neither a probe nor a way around: give it repairs, segments, probe, or bfd")
	} else if !protected && (len(p.Prefixes) > 0 || p.Prefix.IsValid() || p.Shadow || p.Hold != 0) {
		fail("prefixes, hold and shadow need repairs or segments")
	}
	if p.BFD != nil {
		if !protected && !kernel.ValidName(p.Name) { // for protected paths package protect reports it
			fail("use a name of letters, digits, - and _")
		}
		if !protected && (p.Device == "" || len(p.Device) > 15) {
			fail("interface %q: name the link", p.Device)
		}
		if rest := (BFD{Pos: p.BFD.Pos, Peer: p.BFD.Peer, FRR: true}); p.BFD.FRR && *p.BFD != rest {
			errs = append(errs, p.BFD.Errorf("reroute.%s.bfd: frr allows peer only: bfdd's configuration has the rest", p.Name))
		}
		s := p.neighbour()
		for _, err := range s.Validate() {
			errs = append(errs, p.BFD.Errorf("reroute.%s.bfd: %w", p.Name, err))
		}
	}
	if p.Probe == nil {
		return errs
	}
	for _, err := range (liveness.Config{Sessions: []liveness.Session{p.session()}}).Validate() {
		if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
		errs = append(errs, p.Probe.Errorf("reroute.%s.probe: %w", p.Name, err))
	}
	return errs
}

// checkFRR validates a path with the address of a bfdd.
func (p *Path) checkFRR() (errs []error) {
	if _, _, err := peers.Dial(p.FRR); err != nil {
		errs = append(errs, p.Path.Errorf("reroute.%s: frr: %w", p.Name, err))
	}
	rest := *p
	rest.Path = protect.Path{Pos: p.Path.Pos, Name: p.Path.Name, Netns: p.Path.Netns}
	rest.FRR = ""
	if !reflect.DeepEqual(rest, Path{Path: rest.Path}) || !reflect.DeepEqual(p.Path, rest.Path) {
		errs = append(errs, p.Path.Errorf("reroute.%s: frr is for all links of a bfdd: it allows name and netns only", p.Name))
	}
	return errs
}
