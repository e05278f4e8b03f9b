// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
)

// BMPResult is the result for a real router's BMP session.
type BMPResult struct {
	Routes int // announced by the router's neighbour
	Moves  int // between two running collectors: half by the collector's own order, half by weir handoff send
	Kills  int // of the collector with the session, by SIGKILL

	Redumps        int           // repeated tables of the router: sessions, Initiations, Peer Ups or End-of-RIBs in excess
	SessionsOpened int           // by the router to the members
	Rescued        int           // kills with a continued session
	Messages       uint64        // complete and in-order messages of the one session
	Bytes          uint64        // their total length
	RouterBytes    uint64        // sent on this session, reported by the router
	Partial        uint64        // moves with a part of a message
	Wrong          int           // differences from the books of an unmoved session; see Notes
	MoveP50        time.Duration // from the order until the other collector has the session
	MoveP99        time.Duration

	PlainKills, PlainSessions, PlainRedumps int    // the same with an ordinary collector
	DumpBytes                               uint64 // of one table

	Notes []string
}

// BMPOptions sets the extent of the test.
type BMPOptions struct{ Routes, Moves, Kills, PlainKills int }

// ports of the collectors at rig.Service4.
const (
	portA = 1790 + iota
	portB
	portPlain
	portWitness
)

// proof is a run of [BMP].
type proof struct {
	*host
	router    *peers.Router
	members   map[string]*member // by name: "a" and "b"
	plain     *member
	witness   *member // an ordinary, undisturbed collector
	result    *BMPResult
	durations []time.Duration
}

// BMPMissing returns the programs needed by BMP and missing on this machine.
func BMPMissing() (missing []string) {
	for _, program := range []string{"bgpd", "vtysh"} {
		if _, err := lab.Find(program); err != nil {
			missing = append(missing, program)
		}
	}
	return missing
}

// BMP tests a real router's BMP session with moves between two collectors and kills of them, while routes
// change. The router has a second session to an ordinary collector, killed PlainKills times, and a third to
// an undisturbed collector. In the end all must know the same routes.
func BMP(ctx context.Context, e *lab.Env, o BMPOptions) (*BMPResult, error) {
	p := &proof{members: map[string]*member{}, result: &BMPResult{Routes: o.Routes}}
	if err := p.begin(ctx, e, o); err != nil {
		return nil, err
	}
	churn, cancel := context.WithCancel(ctx)
	churned := make(chan error, 1)
	go func() { churned <- p.churn(churn) }()
	err := p.disturb(ctx, o)
	cancel()
	if cerr := <-churned; err == nil {
		err = cerr
	}
	if err == nil {
		err = p.judge(ctx)
	}
	return p.result, err
}

// begin starts all processes, and waits until every collector has the whole table.
func (p *proof) begin(ctx context.Context, e *lab.Env, o BMPOptions) error {
	world, err := rig.NewWorld(e, 1)
	if err != nil {
		return err
	}
	site := world.Real[0]
	if p.host, err = newHost(ctx, e, world.Collectors.Name, "bmp"); err != nil {
		return err
	}
	for _, f := range []func() error{
		func() (err error) { p.plain, err = p.startPlain("plain", portPlain); return err },
		func() (err error) { p.witness, err = p.startPlain("witness", portWitness); return err },
		func() error { return p.startMember("a") },
		func() error { return p.startMember("b") },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	if err := p.await(ctx, p.plain, p.witness, p.members["a"], p.members["b"]); err != nil {
		return err
	}
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(rig.Service4, port) }
	p.router = &peers.Router{Name: "bmp-router", Namespace: site.Router.Name, Neighbour: site.Peer.Name, Addr: site.Addr, Local: site.RouterBGP, Far: site.Neighbour,
		Collector: at(portA), Also: []netip.AddrPort{at(portPlain), at(portWitness)}, Routes: o.Routes}
	if err := p.router.StartBGP(e); err != nil {
		return err
	}
	// Without BGP, FRR would report the end of a session without a begin.
	if err := p.every(ctx, glance, "the router knows the routes", func() (bool, error) {
		out, err := p.router.Ask(ctx, e, "show bgp summary json")
		return strings.Contains(out, fmt.Sprintf(`"pfxRcd":%d`, o.Routes)), ignoreEnd(ctx, err)
	}); err != nil {
		return err
	}
	if err := site.Connect(); err != nil {
		return err
	}
	return p.every(ctx, glance, "every collector has the table", func() (bool, error) {
		for _, m := range []*member{p.plain, p.witness, p.members["a"]} {
			b, err := p.book(ctx, m)
			if err != nil || b == nil || !b.complete(o.Routes) {
				return false, err
			}
			p.result.DumpBytes = b.Bytes
		}
		return true, nil
	})
}

// glance is the poll interval for the state of the router and the collectors.
const glance = 50 * time.Millisecond

// ignoreEnd drops the error of an early query, but not the end of the run.
func ignoreEnd(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return nil
}

// complete reports whether a book has every route, and the mark behind each table. The table before policy
// is empty if the router does not store received routes separately.
func (b *book) complete(routes int) bool {
	for _, p := range b.Peers {
		if p.EndsOfRIB == 0 {
			return false
		}
	}
	return b.routes() >= routes
}

func (p *proof) startMember(name string) error {
	port, to := portA, "b"
	if name == "b" {
		port, to = portB, "a"
	}
	m, err := p.start("bmp", name, p.socket, p.service, name, fmt.Sprintf("%s:%d", rig.Service4, port), p.booksDir(name), p.journal("members"), to)
	p.members[name] = m
	return err
}

func (p *proof) startPlain(name string, port int) (*member, error) {
	return p.start("plain", name, fmt.Sprintf("%s:%d", rig.Service4, port), p.booksDir(name), p.journal(name))
}

func (p *proof) booksDir(name string) string { return filepath.Join(p.dir, name+".books") }
func (p *proof) journal(name string) string  { return filepath.Join(p.dir, name+".journal") }

// book asks a collector for the book of its session; nil if it has none.
func (p *proof) book(ctx context.Context, m *member) (*book, error) {
	path := p.booksDir(m.name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := m.Signal(showSignal); err != nil {
		return nil, err
	}
	var s shown
	err := p.until(ctx, m.name+" shows its books", func() (bool, error) {
		if !m.Running() {
			return false, fmt.Errorf("collector %s has ended: %w; see its log in %s", m.name, m.Err(), p.dir)
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err == nil {
			err = gob.NewDecoder(bytes.NewReader(b)).Decode(&s)
		}
		return true, err
	})
	if err != nil || len(s.Books) == 0 {
		return nil, err
	}
	if len(s.Books) > 1 {
		return nil, fmt.Errorf("collector %s has %d sessions of one router at the same time", m.name, len(s.Books))
	}
	return s.Books[0], nil
}

// churn withdraws and announces a part of the routes, again and again. At its end all are announced.
func (p *proof) churn(ctx context.Context) error {
	some := min(100, p.router.Routes/4)
	for n := 0; ctx.Err() == nil; n = (n + some) % (p.router.Routes - some) {
		for _, withdraw := range []bool{true, false} {
			// With the run's own context: withdrawn routes must return.
			if err := p.router.Announce(context.WithoutCancel(ctx), p.env, n, n+some, withdraw); err != nil {
				return err
			}
			if pause(ctx, 50*time.Millisecond) != nil && !withdraw {
				return nil
			}
		}
	}
	return nil
}

// owner returns the session at the keeper.
func (p *proof) owner(ctx context.Context) (s handoff.SessionReport, err error) {
	all, err := p.sessions(ctx, p.router.Addr)
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("the keeper has %d sessions of the router, want 1; see %s", len(all), p.dir)
	}
	if err == nil {
		s = all[0]
	}
	return s, err
}

// sessionAt waits until the session is at a member, with more moves than before.
func (p *proof) sessionAt(ctx context.Context, m *member, moves int) error {
	return p.until(ctx, "the session is at member "+m.name, func() (bool, error) {
		s, err := p.owner(ctx)
		return s.PID == m.PID && s.Moves > moves, err
	})
}
