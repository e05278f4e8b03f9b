// SPDX-License-Identifier: Apache-2.0

// Package backend is the agent of a backend behind a load balancer. It moves sessions from this backend to others,
// and receives sessions from them. Package move decides the owner of a session. Package lb is the load balancer's
// agent.
//
// For the keeper of this backend, the agent is a member of each service under the names of the other backends. Name
// @b is the way to backend b. A session transferred to @b by a member moves there (weir handoff send SESSION @b). The
// member releases it as for any other member. During the move the keeper has its socket. If the agent dies, the
// socket stays there, and the next agent continues. Under its own backend's name the agent gives arrived sessions to
// the keeper. It transfers each to the member with the former member's name, or to the member with the fewest
// sessions.
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
	Number  move.Backend // of a backend; 0 for a load balancer
	Address string       // host:port
}

// Service is one address of a service with movable sessions. It is on every backend. A service with several addresses
// has several of these.
type Service struct {
	Name   string // name for members and the keeper
	ID     uint16 // number of flows to this address at the load balancer: see peer.FlowService
	Listen netip.AddrPort
}

// Options configure an agent.
type Options struct {
	Name   string // of this backend, in its certificate
	Number move.Backend
	TLS    *peer.Identity `json:"-"`
	LB     Remote
	// LBNames are the names of the load balancers reachable at LB's address; none: only LB's name.
	LBNames []string
	// Registration is sent to the load balancer. In return the agent learns the other backends and the services.
	// Without an Address the agent does not register, and uses only Peers and Services.
	Registration peer.Registration
	Serve        []string // names of services; none: all of the load balancer's
	Peers        []Remote // the other backends
	Services     []Service
	Devices      []string // devices of the services' packets, in both directions

	Keeper string        // socket path; "": $WEIR_HANDOFF_SOCKET, or the default
	Root   *kernel.Root  `json:"-"` // pins of the quarantine
	Netns  *netns.Handle `json:"-"` // of the services; nil: the process's own

	Buffer  bool          // buffer packets of a departing session at this backend, not at the load balancer
	Timeout time.Duration // of a move, before reclaiming it from the load balancer; default 700 ms; less than the load balancer's buffer time
	// TimeoutAt is the position of timeout in the file, for errors.
	TimeoutAt strictyaml.Pos `json:"-"`
	Limit     int            // bytes of a session's queues; default 64 MiB
	Log       *slog.Logger   `json:"-"` // default: no logging

	// Step, if set, is called after each step of a move. Experiments kill the agent there. [Steps] lists the names.
	Step func(name string) `json:"-"`

	home bool // Netns is the process's own
}

// Agent is the agent of one backend. Create it with New.
//
// Lock order: learning, opening, sending.mu, receiving.mu, mu, keeperClient.mu; then the locks of packages
// quarantine, peer and wire. A reader of a keeper's connection only tries sending.mu and receiving.mu. workers.mu and
// asking.mu are held alone.
type Agent struct {
	o          Options
	own        peer.Hello
	quarantine *quarantine.Quarantine
	began      uint64 // CLOCK_MONOTONIC, ns

	known    atomic.Pointer[known]
	lb       *link
	learning sync.Mutex      // held while known is replaced
	opening  sync.Mutex      // held while ways are opened or closed
	ctx      context.Context // of Run
	workers  *workers
	wg       sync.WaitGroup

	mu        sync.Mutex
	sending   map[peer.Flow]*sending
	receiving map[peer.Flow]*receiving
	stopped   map[peer.Flow]bool           // by an earlier agent, and not given to this one yet
	loads     map[string]map[string]uint32 // of this backend's members, by service and name
	unsaid    map[string]bool              // services with loads to report: see reportLoads
	epochs    map[peer.Flow]owned          // of this backend's sessions that have moved
	weight    int                          // as registered: 0 while this backend is drained
	share     int                          // weight acknowledged by the load balancer since the drain's start, or unknown
	balanced  []peer.Service               // services of the load balancer, as last reported
	members   []peer.Member                // all backends of the load balancer, as last reported
	unwanted  string                       // why the load balancer rejects the registration
	attended  map[*peer.Conn]bool          // connections from other backends
	waits     map[peer.Flow]string         // why arrived sessions have no member yet
	stats     counters
	says      chan struct{} // wakes reportLoads
	served    chan struct{} // wakes watchServed
	zones     zones         // conntrack zones
	owning    owning        // data for reportOwned
	owns      chan struct{} // wakes reportOwned

	bufferTime atomic.Int64 // buffer time of the load balancer, ns; 0: unknown

	lbHearsLeft atomic.Bool // the load balancer accepts [move.Left]
	unserved    []string    // services without a server here, sorted
	asked       asking      // by a drain; it has its own lock
}

// New returns an agent, and creates the quarantine at the backend's devices.
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
		return nil, fmt.Errorf("handoff.backend.buffer: %w", quarantine.ErrNoBuffer)
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
		return errors.New("a backend's agent needs a name, a number and a certificate")
	}
	if len(o.Services) == 0 && !o.Registration.Address.IsValid() {
		return errors.New("no services: name some, or register with the load balancer")
	}
	seen := map[move.Backend]string{o.Number: o.Name}
	for _, r := range o.Peers {
		if other, ok := seen[r.Number]; ok || r.Number == 0 || r.Name == "" || r.Name == o.Name {
			return fmt.Errorf("backend %q, number %d: names and numbers must be unique, with numbers from 1 (%q has this one)", r.Name, r.Number, other)
		}
		seen[r.Number] = r.Name
	}
	return nil
}

// Run moves sessions until ctx is done. l accepts other backends' agents.
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
	go a.o.TLS.Watch(ctx, a.o.Name, a.o.Log) // not waited for: files may be on an unresponsive file system
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

// attend serves a connection from another backend, which sends sessions here.
func (a *Agent) attend(ctx context.Context, raw *accept.Conn) {
	defer raw.Close()
	c, err := peer.Accept(ctx, raw.Conn, a.o.TLS, a.own)
	if errors.Is(err, net.ErrClosed) {
		return // closed to admit another
	}
	if err != nil {
		a.o.Log.Warn("agent connection rejected", "peer", raw.Peer, "err", err)
		return
	}
	defer c.Close()
	if !raw.Admit() {
		return // closed meanwhile to admit another
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if k := a.known.Load().links[c.Peer.Number]; c.Peer.Role != peer.BackendAgent || k == nil || k.to.Name != c.Peer.Name {
		a.o.Log.Warn("agent connection rejected", "name", c.Peer.Name, "number", c.Peer.Number, "err", "unknown peer")
		return
	}
	c.TakeSessions()
	a.mu.Lock()
	for before := range a.attended {
		if before.Peer.Number == c.Peer.Number { // frames may be large: one connection per backend is enough
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

// fromLB processes a frame from the load balancer.
func (a *Agent) fromLB(c *peer.Conn, f peer.Frame) {
	switch f.Message.To {
	case move.AtSource:
		a.toSource(c, f)
	case move.AtDestination:
		a.toDestination(c, f)
	}
}

// linkChanged opens or closes the ways to a backend. They need connections to the load balancer and to the other
// backend's agent. Every change of these connections or of known ends in a call here. Calls are serialized, so a
// stale caller cannot win.
func (a *Agent) linkChanged(k *link) {
	if k.conn() == nil {
		a.lost(k.to.Number)
	}
	a.opening.Lock()
	defer a.opening.Unlock()
	if now := a.known.Load().links[k.to.Number]; now != nil {
		k = now // an outdated link does not count for a backend with a new address
	}
	open := k.conn() != nil && a.lb.conn() != nil
	if k.conn() == nil {
		for _, p := range a.known.Load().away[k.to.Number] {
			a.loadThere(k.to, a.known.Load().number(p.service), math.MaxUint32, false) // closed: no sessions go there
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
			a.tellOwned() // otherwise as soon as the load balancer has sent its services
		}
		a.tellLoads() // loads are lost with a connection
	}
}

// hello returns the first message to the load balancer, with the registration.
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

// lbIsBack repeats messages that may have been lost with the connection.
func (a *Agent) lbIsBack() {
	leaving, arriving := a.all()
	for _, s := range leaving {
		if !s.mu.TryLock() { // it is being sent, or about to ask: watchSending retries
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

// tick is the interval of timeout checks.
const tick = 25 * time.Millisecond

// watch runs the timers of sessions.
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

// keepAgain gives a new keeper the sessions under way.
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
		a.wg.Go(func() { s.mu.Lock(); again() }) // it is being sent; reading the keeper's answers must not wait for that
	}
	for _, r := range arriving {
		r.mu.Lock()
		if r.home == p && r.fd >= 0 {
			_ = p.post(r.keep(), r.fd)
		}
		r.mu.Unlock()
	}
}
