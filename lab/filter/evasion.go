// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

// way is the path of probes to the answering host.
type way int

const (
	toHost   way = iota // from the sender to the filtered host
	through             // to the next host
	fromHost            // from the filtered host to the next one, by raw sockets
)

func (w way) dst(six bool) []byte {
	switch {
	case w == toHost && six:
		return host6[:]
	case w == toHost:
		return host4[:]
	case six:
		return next6[:]
	}
	return next4[:]
}

// point is a location of a filter, with the chain of nftables for the same packets.
type point struct {
	hook  filter.Hook
	at    filter.Point     // netfilter, nft
	dir   filter.Direction // tcx, clsact
	way   way
	chain string // of nftables: its family and hook
}

const (
	nftIngress = "netdev ingress device " + device
	nftEgress  = "netdev egress device " + outDevice
)

// evasionPoints are all hooks of filter, at each position on the path of packets.
var evasionPoints = []point{
	{filter.HookXDP, "", "", toHost, nftIngress},
	{filter.HookXDPGeneric, "", "", toHost, nftIngress},
	{filter.HookTCX, "", filter.Ingress, toHost, nftIngress},
	{filter.HookClsact, "", filter.Ingress, toHost, nftIngress},
	{filter.HookNetfilter, "prerouting", "", toHost, "inet prerouting"},
	{filter.HookNFT, "prerouting", "", toHost, "inet prerouting"},
	{filter.HookNetfilter, "input", "", toHost, "inet input"},
	{filter.HookNFT, "input", "", toHost, "inet input"},
	{filter.HookSocket, "", "", toHost, "inet input"},
	{filter.HookNetfilter, "forward", "", through, "inet forward"},
	{filter.HookNFT, "forward", "", through, "inet forward"},
	{filter.HookNetfilter, "postrouting", "", through, "inet postrouting"},
	{filter.HookNFT, "postrouting", "", through, "inet postrouting"},
	{filter.HookTCX, "", filter.Egress, through, nftEgress},
	{filter.HookClsact, "", filter.Egress, through, nftEgress},
	{filter.HookNetfilter, "output", "", fromHost, "inet output"},
	{filter.HookNFT, "output", "", fromHost, "inet output"},
}

func (p point) String() string {
	return strings.TrimSpace(fmt.Sprint(p.hook, " ", p.at, p.dir))
}

// first reports whether no code of the host sees a packet before this point.
func (p point) first() bool { return p.chain == nftIngress }

// attempt is one probe of a pass: a shape and an ask.
type attempt struct{ shape, ask int }

// pass holds the results of all probes with one filter, or without a filter.
type pass struct {
	name    string
	number  uint16
	way     way
	stopped map[attempt]bool // counted by a rule
	refused map[attempt]bool // not sent: the raw socket rejects such a packet
}

type evasion struct {
	*experiment
	points     []point
	unreadable filter.Unreadable // of the filters
	w          *evasionWorld
	shapes     []shape
	passes     uint16
	ids        uint32
}

// evasions sends probes in every shape to every hook, and compares the results with nftables.
func (x *experiment) evasions(ctx context.Context) error {
	return (&evasion{experiment: x, points: evasionPoints}).all(ctx)
}

func (e *evasion) all(ctx context.Context) error {
	e.shapes = evasionShapes()
	e.say("%d shapes of packets hide their ports, at %d locations; comparing with nftables", len(e.shapes), len(e.points))
	var err error
	if e.w, err = e.newEvasionWorld(); err != nil {
		return err
	}
	return pinned(func() error { return e.run(ctx) })
}

func (e *evasion) run(ctx context.Context) error {
	none := map[way]*pass{}
	for _, w := range []way{toHost, through, fromHost} {
		p, err := e.pass(ctx, "no filter", w, nil)
		if err != nil {
			return err
		}
		none[w] = p
	}
	reference := map[string]*pass{}
	var judged []func()
	found := findings{}
	for _, pt := range e.points {
		if reference[pt.chain] == nil {
			p, err := e.nftPass(ctx, pt)
			if err != nil {
				return fmt.Errorf("nftables at %s: %w", pt.chain, err)
			}
			reference[pt.chain] = p
		}
		p, err := e.weirPass(ctx, pt)
		if err != nil {
			return fmt.Errorf("%s: %w", pt, err)
		}
		judged = append(judged, func() { e.judge(pt, none[pt.way], reference[pt.chain], p, found) })
	}
	// Late answers count too: all are read after the last one has arrived.
	for _, w := range []way{toHost, through} {
		for _, a := range asks {
			if a.proto == protoUDP {
				if err := e.w.mark(w.dst(false), a.port); err != nil {
					return err
				}
			}
		}
	}
	for _, m := range []string{"evasions", "nft_evasions", "evasion_innocents_lost", "evasion_probes"} {
		e.result.Set(m, 0)
	}
	for _, judge := range judged {
		judge()
	}
	for _, what := range slices.Sorted(maps.Keys(found)) {
		e.result.Note("%s at %s", what, strings.Join(found[what], ", "))
	}
	e.count(none)
	return nil
}

// count sets the extent of the comparison.
func (e *evasion) count(none map[way]*pass) {
	answered := map[int]bool{}
	for i := range e.shapes {
		for j := range asks {
			for _, p := range none {
				if e.reached(p, attempt{i, j}) {
					answered[i] = true
				}
			}
		}
	}
	hooks := map[filter.Hook]bool{}
	for _, p := range e.points {
		hooks[p.hook] = true
	}
	e.result.Set("evasion_shapes", float64(len(e.shapes)))
	e.result.Set("evasion_shapes_answered", float64(len(answered)))
	e.result.Set("evasion_hooks", float64(len(hooks)))
	e.result.Set("evasion_places", float64(len(e.points)))
}

// applies reports whether a shape supports an ask.
func (s *shape) applies(a ask) bool {
	ofTCP := s.options != "" || s.offset != 0 || s.flags != 0
	return !(ofTCP && a.proto != protoTCP) && !(a.name == "option" && s.options == "-")
}

// probe creates the probe of an attempt. Each has its own address; answers and nftables' sets identify it
// by this address.
func (e *evasion) probe(p *pass, at attempt) *disguise {
	s := &e.shapes[at.shape]
	e.ids++
	pr := &disguise{ask: asks[at.ask], dst: p.way.dst(s.six), sport: 20000 + p.number, id: e.ids, src: e.source(at).AsSlice()}
	if s.toSID && p.way == toHost {
		pr.dst = sid[:]
	}
	pr.build(s)
	return pr
}

func (e *evasion) source(at attempt) netip.Addr {
	if e.shapes[at.shape].six {
		return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0, 0x77, 13: byte(at.shape), 15: byte(1 + at.ask)})
	}
	return netip.AddrFrom4([4]byte{10, 77, byte(at.shape), byte(1 + at.ask)})
}

// reached reports whether the host has answered.
func (e *evasion) reached(p *pass, at attempt) bool {
	return e.w.replies[reply{e.source(at), 20000 + p.number, asks[at.ask].port}]
}

// pass sends all probes. counts, if set, returns the packets of each rule so far.
func (e *evasion) pass(ctx context.Context, name string, w way, counts func() (map[string]uint64, error)) (*pass, error) {
	e.passes++
	p := &pass{name: name, number: e.passes, way: w, stopped: map[attempt]bool{}, refused: map[attempt]bool{}}
	var before map[string]uint64
	for i := range e.shapes {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		for j, a := range asks {
			if !e.shapes[i].applies(a) {
				continue
			}
			ok, err := e.sendProbe(p, attempt{i, j})
			if err != nil {
				return nil, fmt.Errorf("%s to %s %d: %w", e.shapes[i].name, a.name, a.port, err)
			}
			p.refused[attempt{i, j}] = !ok
		}
		if err := e.w.mark(w.dst(false), markerPort); err != nil {
			return nil, err
		}
		if counts == nil {
			continue
		}
		now, err := counts()
		if err != nil {
			return nil, err
		}
		p.note(e.shapes[i].blind, i, before, now)
		before = now
	}
	return p, nil
}

// note records the probes of a shape counted by rules. In shapes without a visible port the first rule
// drops them all.
func (p *pass) note(blind bool, shape int, before, now map[string]uint64) {
	var all, want uint64
	for _, a := range asks {
		if a.name != "" {
			all += now[a.name] - before[a.name]
			want++
		}
	}
	for j, a := range asks {
		if a.name != "" && (now[a.name] > before[a.name] || blind && all >= want) {
			p.stopped[attempt{shape, j}] = true
		}
	}
}

// sendProbe sends the packets of a probe. It returns false if the filtered host's raw socket rejects one.
func (e *evasion) sendProbe(p *pass, at attempt) (bool, error) {
	s := &e.shapes[at.shape]
	pr := e.probe(p, at)
	for _, ip := range s.packets(pr) {
		if p.way != fromHost {
			if err := e.w.send(&packet{frame: e.w.frame(s.tags, ip)}); err != nil {
				return false, err
			}
			continue
		}
		var err error
		switch {
		case len(s.tags) > 0:
			return false, nil
		case ip[0]>>4 == 4:
			err = unix.Sendto(e.w.raw[0], ip, 0, &unix.SockaddrInet4{Addr: [4]byte(pr.dst)})
		default:
			err = unix.Sendto(e.w.raw[1], ip, 0, &unix.SockaddrInet6{Addr: [16]byte(pr.dst)})
		}
		if errors.Is(err, unix.EINVAL) {
			return false, nil
		} else if err != nil && !errors.Is(err, unix.EPERM) { // the filter's answer
			return false, err
		}
	}
	return true, nil
}

// weirPass runs a pass with a filter at the point.
func (e *evasion) weirPass(ctx context.Context, pt point) (*pass, error) {
	var rules []filter.Rule
	for _, a := range asks {
		if a.rule != "" {
			rules = append(rules, filter.Rule{Name: a.name, Match: filter.Expression{Text: a.rule}, Action: filter.Drop})
		}
	}
	if pt.hook == filter.HookSocket {
		var held []*filter.Socket
		defer func() {
			for _, s := range held {
				s.Close()
			}
		}()
		for _, c := range e.w.conns {
			s, err := filter.AttachSocket(c, rules, filter.Pass)
			if err != nil {
				return nil, err
			}
			held = append(held, s)
		}
		out, err := e.pass(ctx, pt.String(), pt.way, nil)
		out.stopped = nil // the kernel's own drops precede sockets
		return out, err
	}
	f := filter.Filter{Name: "lab", Hook: pt.hook, Netns: e.w.hostName, Rules: rules, Unreadable: e.unreadable, At: pt.at, Direction: pt.dir}
	if pt.at == "" {
		f.Interfaces = []string{device}
		if pt.dir == filter.Egress {
			f.Interfaces = []string{outDevice}
		}
	}
	p := product{kernel.OpenRoot(e.env.Root)}
	if err := p.apply(ctx, f); err != nil {
		return nil, err
	}
	out, err := e.pass(ctx, pt.String(), pt.way, func() (map[string]uint64, error) { return p.counts(ctx) })
	return out, errors.Join(err, p.apply(ctx))
}

// nftPass runs a pass with the same rules in nftables.
func (e *evasion) nftPass(ctx context.Context, pt point) (*pass, error) {
	family, hook, _ := strings.Cut(pt.chain, " ")
	var rules []string
	for _, a := range asks {
		if a.nft != "" {
			rules = append(rules, a.nft+" add @hit4 { ip saddr } drop", a.nft+" add @hit6 { ip6 saddr } drop")
		}
	}
	text := fmt.Sprintf("table %s evade {\n set hit4 { type ipv4_addr; flags dynamic; size 65535; }\n set hit6 { type ipv6_addr; flags dynamic; size 65535; }\n"+
		" chain c {\n  type filter hook %s priority 0; policy accept;\n  %s\n }\n}\n", family, hook, strings.Join(rules, "\n  "))
	if err := e.env.NFT(ctx, e.w.hostName, text); err != nil {
		return nil, err
	}
	p, err := e.pass(ctx, "nftables "+pt.chain, pt.way, nil)
	if err != nil {
		return nil, err
	}
	hit, err := e.nftHit(ctx, family)
	for i := range e.shapes {
		for j := range asks {
			p.stopped[attempt{i, j}] = hit[e.source(attempt{i, j})]
		}
	}
	return p, errors.Join(err, e.env.NFT(ctx, e.w.hostName, fmt.Sprintf("delete table %s evade\n", family)))
}

// nftHit returns the addresses in the sets.
func (e *evasion) nftHit(ctx context.Context, family string) (map[netip.Addr]bool, error) {
	out := map[netip.Addr]bool{}
	for _, set := range []string{"hit4", "hit6"} {
		var says bytes.Buffer
		p, err := e.env.Start(lab.Command{Namespace: e.w.hostName, Path: "nft", Args: []string{"list", "set", family, "evade", set}, Output: &says})
		if err != nil {
			return nil, err
		}
		select {
		case <-p.Done():
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if err := p.Err(); err != nil {
			return nil, fmt.Errorf("nft list set: %w: %.300s", err, says.String())
		}
		for _, word := range strings.FieldsFunc(says.String(), func(r rune) bool { return strings.ContainsRune(" ,{}=\n\t", r) }) {
			if a, err := netip.ParseAddr(word); err == nil {
				out[a] = true
			}
		}
	}
	return out, nil
}

// findings holds the faults, each with its locations.
type findings map[string][]string

func (f findings) add(pt point, format string, a ...any) {
	what := fmt.Sprintf(format, a...)
	f[what] = append(f[what], pt.String())
}

// judge compares a filter with nftables and with no filter.
func (e *evasion) judge(pt point, none, nft, weir *pass, found findings) {
	for _, at := range e.attempts() {
		s, a := &e.shapes[at.shape], asks[at.ask]
		if weir.refused[at] {
			continue
		}
		e.result.Metrics["evasion_probes"]++
		alive := e.reached(none, at)
		if a.name == "" {
			if alive && !s.blind && !e.reached(weir, at) {
				e.result.Metrics["evasion_innocents_lost"]++
				found.add(pt, "%s to port %d is dropped", s.name, a.port)
			}
			continue
		}
		if through := e.passed(pt, nft, at, alive); through {
			e.result.Metrics["nft_evasions"]++
		}
		through := e.passed(pt, weir, at, alive) || !alive && weir.stopped != nil && nft.stopped[at] && !weir.stopped[at]
		if through && s.inside {
			through = !e.passed(pt, nft, at, alive)
		}
		if through {
			e.result.Metrics["evasions"]++
			found.add(pt, "%s evades rule %s", s.name, a.name)
		}
	}
}

// attempts returns all attempts.
func (e *evasion) attempts() (out []attempt) {
	for i := range e.shapes {
		for j, a := range asks {
			if e.shapes[i].applies(a) {
				out = append(out, attempt{i, j})
			}
		}
	}
	return out
}

// passed reports whether a probe came through. A probe may lack an answer even without a filter. The rules'
// counts then decide, if the host cannot have dropped it before. Elsewhere it counts as not passed.
func (e *evasion) passed(pt point, p *pass, at attempt, alive bool) bool {
	if alive {
		return e.reached(p, at)
	}
	return pt.first() && !p.stopped[at]
}
