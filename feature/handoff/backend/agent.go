// SPDX-License-Identifier: Apache-2.0

// Package backend is the agent of a backend behind a load balancer: it has sessions move from this backend to another, and from
// others to this one. Package move says who owns a session and when; the load balancer's agent is package lb's.
//
// To the keeper of this backend the agent is a member of each service under the names of the other backends: @b is the way to
// backend b, and a session that a member transfers to @b moves there (weir handoff send SESSION @b). So whoever moves a session
// has let go of it in the way that it does for any other member, and while it moves the keeper has its socket: an agent
// that dies leaves it there, and the next one goes on. Under the name of its own backend the agent gives the keeper what has come,
// and transfers it to the member that is called like the one that had it, else to whoever has the fewest.
package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/ratelog"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// Remote is another agent.
type Remote struct {
	Name    string       // in its certificate
	Number  move.Backend // of a backend; 0 of a load balancer
	Address string       // host:port
}

// Service is an address of a service whose sessions move. It is on every backend. A service with several has one of these for each.
type Service struct {
	Name   string // as members and the keeper call it
	ID     uint16 // as the load balancer calls flows to this address: see peer.FlowService
	Listen netip.AddrPort
}

// Options say which backend this is.
type Options struct {
	Name   string // of this backend, in its certificate
	Number move.Backend
	TLS    *peer.Identity `json:"-"`
	LB     Remote
	// LBNames are those of the load balancers that Front's address may lead to; none: Front's name alone.
	LBNames []string
	// Registration is what the load balancer is told of this backend: from it the agent then learns the other backends and the
	// services. Without an Address it does not register, and Peers and Services say all there is.
	Registration peer.Registration
	Serve        []string // names of services; none: all that the load balancer has
	Peers        []Remote // the other backends
	Services     []Service
	Devices      []string // that the services' packets come by, and answers leave by

	Keeper string        // its socket; "": $WEIR_HANDOFF_SOCKET, else the default
	Root   *kernel.Root  `json:"-"` // of the quarantine's pins
	Netns  *netns.Handle `json:"-"` // of the services; nil: the process's own

	Buffer  bool          // packets of a session that leaves wait at this backend until it has moved, not at the load balancer
	Timeout time.Duration // of a move, before the load balancer is asked what became of it; default 700 ms. Less than the load balancer holds
	// TimeoutAt is the place of timeout in a file, for errors.
	TimeoutAt strictyaml.Pos `json:"-"`
	Limit     int            // bytes of a session's queues; default repair.DefaultLimit
	Log       *slog.Logger   `json:"-"` // default: nothing is logged

	// Step is called after each step of a move, by which experiments kill the agent there; nil in use. [Steps] names them.
	Step func(name string) `json:"-"`

	home bool // Netns is the process's own
}

// Agent is that of one backend. Make it with New.
//
// Lock order: learning, opening, sending.mu, receiving.mu, mu, keeperClient.mu; then the locks of packages quarantine, peer and
// wire. A reader of a keeper's connection only tries sending.mu and receiving.mu. workers.mu and asking.mu are held alone.
type Agent struct {
	o          Options
	own        peer.Hello
	quarantine *quarantine.Quarantine
	began      uint64 // CLOCK_MONOTONIC, ns

	known    atomic.Pointer[known]
	lb       *link
	learning sync.Mutex      // known is being replaced
	opening  sync.Mutex      // ways are being opened or closed
	ctx      context.Context // of Run
	workers  *workers
	wg       sync.WaitGroup

	mu        sync.Mutex
	sending   map[peer.Flow]*sending
	receiving map[peer.Flow]*receiving
	stopped   map[peer.Flow]bool           // by an agent before us, and not given to us yet
	loads     map[string]map[string]uint32 // of members of this backend, by service and name
	unsaid    map[string]bool              // services of which reportLoads has to tell
	epochs    map[peer.Flow]owned          // of sessions of this backend's that have moved
	weight    int                          // as registered: 0 while this backend is drained
	share     int                          // this backend's weight as the load balancer goes by it, since drain has asked; unknown: it has not said
	unwanted  string                       // why the load balancer refuses the registration
	attended  map[*peer.Conn]bool          // the other backends that are connected
	waits     map[peer.Flow]string         // why sessions that are for a member of this backend are not its yet
	stats     counters
	says      chan struct{} // to reportLoads
	served    chan struct{} // to watchServed
	zones     zones         // of conntrack
	owning    owning        // what reportOwned tells
	owns      chan struct{} // to reportOwned

	bufferTime atomic.Int64 // for how long the load balancer holds packets, ns; 0: it does not say

	lbHearsLeft atomic.Bool // it takes [move.Left], as it says
	unserved    []string    // services that nobody serves here, sorted
	asked       asking      // by a drain; it has its own lock
}

// New makes an agent, and the quarantine at the backend's devices.
func New(ctx context.Context, o Options) (*Agent, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Netns == nil {
		ns, err := netns.Current()
		if err != nil {
			return nil, err
		}
		o.Netns, o.home = ns, true
	}
	q, err := quarantine.Open(ctx, o.Root, o.Netns, o.Devices, o.Log)
	if err != nil {
		return nil, err
	}
	a := &Agent{o: o, quarantine: q, began: kernel.Monotonic(), own: peer.Hello{Role: peer.BackendAgent, Number: o.Number, Instance: peer.NewInstance(), Name: o.Name},
		sending: map[peer.Flow]*sending{}, receiving: map[peer.Flow]*receiving{}, stopped: map[peer.Flow]bool{}, epochs: map[peer.Flow]owned{},
		loads: map[string]map[string]uint32{}, unsaid: map[string]bool{}, says: make(chan struct{}, 1), served: make(chan struct{}, 1), owns: make(chan struct{}, 1), attended: map[*peer.Conn]bool{}, waits: map[peer.Flow]string{}, weight: o.Registration.Weight}
	if o.Buffer && !q.Buffers() {
		q.Close()
		return nil, fmt.Errorf("packets are to wait here, and cannot: %w", quarantine.ErrNoBuffer)
	}
	a.stats.rejected = map[string]uint64{}
	a.known.Store(&known{})
	a.lb = &link{a: a, to: o.LB, names: o.LBNames, hello: a.hello, hear: a.fromLB, changed: a.lbChanged}
	return a, nil
}

func (o *Options) check() error {
	o.Log = ratelog.Limit(o.Log)
	if o.Step == nil {
		o.Step = func(string) {}
	}
	if o.Timeout == 0 {
		o.Timeout = 700 * time.Millisecond
	}
	if o.Root == nil {
		o.Root = kernel.OpenRoot("")
	}
	o.Keeper = wire.Socket(o.Keeper)
	if o.Name == "" || o.Number == 0 || o.TLS == nil {
		return errors.New("a backend's agent wants its name, its number and a certificate")
	}
	if len(o.Services) == 0 && !o.Registration.Address.IsValid() {
		return errors.New("no services: name those whose sessions may move, or register with the load balancer")
	}
	seen := map[move.Backend]string{o.Number: o.Name}
	for _, r := range o.Peers {
		if other, ok := seen[r.Number]; ok || r.Number == 0 || r.Name == "" || r.Name == o.Name {
			return fmt.Errorf("backend %q, number %d: names and numbers are one backend's each, from 1 on (%q has this one)", r.Name, r.Number, other)
		}
		seen[r.Number] = r.Name
	}
	return nil
}

// Run moves sessions until ctx is done. l is where other backends' agents connect to.
func (a *Agent) Run(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	a.ctx = ctx
	a.workers = newWorkers(ctx.Done())
	defer a.quarantine.Close()
	defer a.wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	a.learn(a.o.Peers, a.o.Services)
	a.wg.Go(func() { a.lb.run(ctx) })
	a.wg.Go(func() { a.watch(ctx) })
	a.wg.Go(func() { a.reportLoads(ctx) })
	a.wg.Go(func() { a.watchServed(ctx) })
	a.wg.Go(func() { a.watchZones(ctx) })
	a.wg.Go(func() { a.reportOwned(ctx) })
	go a.hearStrays()                        // until the quarantine is closed
	go a.o.TLS.Watch(ctx, a.o.Name, a.o.Log) // not waited for: files may be where nobody answers
	in := accept.New(l, accept.Options{Name: "agents", Log: a.o.Log})
	for {
		raw, err := in.Next()
		if err != nil { // closed
			cancel()
			return nil
		}
		a.wg.Go(func() { a.attend(ctx, raw) })
	}
}

// attend hears a backend that sends sessions here.
func (a *Agent) attend(ctx context.Context, raw *accept.Conn) {
	defer raw.Close()
	c, err := peer.Accept(ctx, raw.Conn, a.o.TLS, a.own)
	if errors.Is(err, net.ErrClosed) {
		return // closed for another
	}
	if err != nil {
		a.o.Log.Warn("an agent is refused", "peer", raw.Peer, "err", err)
		return
	}
	defer c.Close()
	if !raw.Admit() {
		return // closed for another, meanwhile
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if k := a.known.Load().links[c.Peer.Number]; c.Peer.Role != peer.BackendAgent || k == nil || k.to.Name != c.Peer.Name {
		a.o.Log.Warn("an agent is refused", "name", c.Peer.Name, "number", c.Peer.Number, "reason", "it is none of this backend's peers")
		return
	}
	c.TakeSessions()
	a.mu.Lock()
	for before := range a.attended {
		if before.Peer.Number == c.Peer.Number { // each may carry large frames: one connection of a backend is enough
			before.Close()
		}
	}
	a.attended[c] = true
	a.mu.Unlock()
	a.tellLoads()
	defer func() {
		a.mu.Lock()
		delete(a.attended, c)
		a.mu.Unlock()
	}()
	a.workers.hear(c, func(f peer.Frame) {
		if !f.IsLoad {
			a.startReceive(c, f)
		}
	})
}

// fromLB takes what the load balancer says.
func (a *Agent) fromLB(c *peer.Conn, f peer.Frame) {
	switch f.Message.To {
	case move.AtSource:
		a.toSource(c, f)
	case move.AtDestination:
		a.toDestination(c, f)
	}
}

// linkChanged opens the ways to a backend, or closes them: they lead over the load balancer and the other backend's agent.
// What changes, of the link, the load balancer's and what is known, says so here afterwards, each by itself: one that has seen less
// must not have the last word.
func (a *Agent) linkChanged(k *link) {
	if k.conn() == nil {
		a.lost(k.to.Number)
	}
	a.opening.Lock()
	defer a.opening.Unlock()
	if now := a.known.Load().links[k.to.Number]; now != nil {
		k = now // of a backend that is found elsewhere the link before has no say
	}
	open := k.conn() != nil && a.lb.conn() != nil
	if k.conn() == nil {
		for _, p := range a.known.Load().away[k.to.Number] {
			a.loadThere(k.to, a.known.Load().number(p.service), math.MaxUint32, false) // nothing moves there
		}
	}
	for _, p := range a.known.Load().away[k.to.Number] {
		p.setReady(open)
	}
}

func (a *Agent) lbChanged(k *link) {
	for _, l := range a.known.Load().links {
		a.linkChanged(l)
	}
	if k.conn() != nil {
		a.lbIsBack()
		a.orphans()
		if !a.o.Registration.Address.IsValid() {
			a.tellOwned() // else as soon as it has told of its services
		}
		a.tellLoads() // it knows of none: with the connection it has forgotten them
	}
}

// hello is what the load balancer is told first: who this is, and what it has for it.
func (a *Agent) hello() peer.Hello {
	h := a.own
	if a.o.Registration.Address.IsValid() {
		h.Beside = &peer.Beside{Register: a.registration(), Peers: a.told}
	}
	return h
}

func (a *Agent) registration() peer.Registration {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.o.Registration
	r.Weight, r.Unserved = a.weight, a.unserved
	return r
}

// lbIsBack says again what may have been lost with the connection.
func (a *Agent) lbIsBack() {
	leaving, arriving := a.all()
	for _, s := range leaving {
		if !s.mu.TryLock() { // it is being sent, or about to ask: watchSending asks again
			continue
		}
		if s.src.Phase == move.Holding || s.src.Phase == move.Reclaiming {
			a.executeSend(s, s.src.Retry())
		}
		s.mu.Unlock()
	}
	for _, r := range arriving {
		r.mu.Lock()
		a.come(r, r.dst.Reconnected())
		r.mu.Unlock()
	}
}

func (a *Agent) all() (l []*sending, r []*receiving) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sending {
		l = append(l, s)
	}
	for _, s := range a.receiving {
		r = append(r, s)
	}
	return l, r
}

// tick is how often it is looked whether somebody has lost patience.
const tick = 25 * time.Millisecond

// watch does what time brings.
func (a *Agent) watch(ctx context.Context) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			leaving, arriving := a.all()
			for _, s := range leaving {
				a.watchSending(s, now)
			}
			for _, r := range arriving {
				a.watchReceiving(r, now)
			}
		}
	}
}

// keepAgain gives a keeper that is new what it does not know.
func (a *Agent) keepAgain(p *keeperClient) {
	leaving, arriving := a.all()
	for _, s := range leaving {
		if s.by != p {
			continue
		}
		again := func() {
			defer s.mu.Unlock()
			if s.src.Phase != move.Closed {
				_ = p.post(s.keep(), s.fd)
			}
		}
		if s.mu.TryLock() {
			again()
			continue
		}
		a.wg.Go(func() { s.mu.Lock(); again() }) // it is being sent, and the keeper's answers are not to wait for that
	}
	for _, r := range arriving {
		r.mu.Lock()
		if r.home == p && r.fd >= 0 {
			_ = p.post(r.keep(), r.fd)
		}
		r.mu.Unlock()
	}
}
