// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/loads"
	"github.com/weir-project/weir/feature/handoff/lb/quota"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/ratelog"
	"github.com/weir-project/weir/kernel"
)

// AgentOptions configure the agent of a load balancer.
type AgentOptions struct {
	Name     string // in the agent's certificate
	TLS      *peer.Identity
	Backends []Backend // their agents may connect
	// Manage makes the agent set the data path's backends: the Managed ones, and with Register also backends without an entry in
	// the file. Otherwise the caller calls [DataPath.SetBackends].
	Manage   bool
	Managed  []Managed
	Register bool
	Services []Service // as named by registering backends
	// Partner is a second load balancer with the same backends. The two exchange flows. The zero value means none.
	Partner Partner
	// AgentTimeout is the silence of a backend's agent after which the backend gets no new flows. Default 3 s.
	AgentTimeout time.Duration
	// BufferTimeout bounds the wait of packets of a moving session. Default 1 s. MoveTimeout ends a move without any message.
	// Default 10 s.
	BufferTimeout, MoveTimeout time.Duration
	// EndedTimeout is how long an ended flow stays known. Default 5 s. IdleTimeout is the same for a flow without packets. Default 1 h.
	EndedTimeout, IdleTimeout time.Duration
	Log                       *slog.Logger // default: no logging
	// Step is called after each of [Steps]. Experiments kill the agent there. nil in production.
	Step func(name string)
}

// Agent lets backends move sessions. It plays the load balancer of package move. The data path forwards packets without it.
type Agent struct {
	f     *DataPath
	o     AgentOptions
	own   peer.Hello
	names map[move.Backend]string

	pair    *pairing      // nil: no partner
	openFor time.Duration // timeout of the partner's moves; tests shorten it

	// Lock order: mu, pairing.mu, DataPath.mu, the lock of package packetbuf, bufferDevice.mu, the locks of packages peer and names.
	mu        sync.Mutex
	backends  map[move.Backend]*peer.Conn
	timers    map[Key]*time.Timer
	early     map[Key]*early
	loads     loads.Loads
	members   map[move.Backend]*member
	announced *peer.Peers // the latest announcement; nil: none
	news      bool        // a member has changed since the latest announcement
	kick      chan struct{}
	left      map[move.Backend]time.Time // time of each agent's disconnection
	// young are numbers taken while the partner was not heard, with the time: they yield to an older owner there.
	young     map[move.Backend]time.Time
	flowsOf   map[move.Backend]int    // flows by owner, at the latest count
	absent    map[move.Backend]bool   // numbers with a location that another backend may take: see freeNumbers
	forgotten map[move.Backend]string // by number, removed after a long absence; the partner may still list them
	began     time.Time
	reports   quota.Reports
	unasked   bool           // more unconfirmed flows than their share, see countUnasked
	startup   *startup       // nil unless the data path is new and backends still have sessions to report
	ended     bool           // Serve has returned and the data path may be closed: nobody may use it
	asides    sync.WaitGroup // goroutines locating and checking backends
	routes    routes         // used by tend alone
}

// NewAgent returns an agent for a data path. Without Manage the data path must already have its backends: see [DataPath.SetBackends].
func NewAgent(f *DataPath, o AgentOptions) (*Agent, error) {
	for _, d := range []struct {
		of  *time.Duration
		def time.Duration
	}{{&o.BufferTimeout, spec.DefaultBufferTimeout}, {&o.MoveTimeout, spec.DefaultMoveTimeout}, {&o.EndedTimeout, 5 * time.Second}, {&o.IdleTimeout, spec.DefaultIdleTimeout}, {&o.AgentTimeout, defaultDown}} {
		if *d.of == 0 {
			*d.of = d.def
		}
	}
	o.Log = ratelog.Limit(o.Log)
	if o.Step == nil {
		o.Step = func(string) {}
	}
	a := &Agent{f: f, o: o, own: peer.Hello{Role: peer.LBAgent, Instance: peer.NewInstance(), Name: o.Name}, names: map[move.Backend]string{},
		backends: map[move.Backend]*peer.Conn{}, timers: map[Key]*time.Timer{}, early: map[Key]*early{},
		members: map[move.Backend]*member{}, kick: make(chan struct{}, 1), left: map[move.Backend]time.Time{}, forgotten: map[move.Backend]string{}, young: map[move.Backend]time.Time{}, absent: map[move.Backend]bool{}, began: time.Now(), openFor: max(openFor, 2*o.MoveTimeout)}
	for _, h := range o.Backends {
		a.names[h.Number] = h.Name
	}
	for _, h := range o.Managed {
		if a.members[h.Number] != nil || h.Number == 0 || h.Number > MaxBackends || h.Name == "" {
			return nil, fmt.Errorf("backend %q, number %d: give it a name, and a number of its own from 1 to %d", h.Name, h.Number, MaxBackends)
		}
		a.names[h.Number] = h.Name
		h.Address = h.Address.Unmap()
		a.members[h.Number] = &member{Managed: h, told: &h}
	}
	if err := a.keepNamed(); err != nil {
		return nil, err
	}
	f.bufferFor, f.ended = a.o.BufferTimeout+slack, uint32(min(a.o.EndedTimeout.Milliseconds(), math.MaxUint32))
	f.reclaim = uint16(min(math.Ceil((a.openFor - openFor).Seconds()), math.MaxUint16))
	if o.Partner.Name != "" {
		a.pair = newPairing()
	}
	a.beginStartup()
	return a, nil
}

// Serve accepts agents on l until ctx is done.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	if err := a.resumeMoves(); err != nil {
		return fmt.Errorf("resume moves: %w", err)
	}
	var wg sync.WaitGroup
	defer a.end()
	defer wg.Wait()
	if a.o.Partner.Name != "" {
		if err := a.exchange(ctx, &wg); err != nil {
			return err
		}
	}
	go a.o.TLS.Watch(ctx, a.o.Name, a.o.Log) // not waited for: reading the files can block, for example on a dead NFS server
	wg.Go(func() { a.collect(ctx) })
	wg.Go(func() { a.forget(ctx) })
	wg.Go(func() { a.tend(ctx) })
	in := accept.New(l, accept.Options{Name: "agents", Log: a.o.Log})
	for {
		raw, err := in.Next()
		if err != nil { // l is closed
			cancel()
			return nil
		}
		wg.Go(func() { a.attend(ctx, raw) })
	}
}

// collect moves packets from the device's queue into memory, until ctx is done.
func (a *Agent) collect(ctx context.Context) {
	ready, err := a.f.ready()
	if err == nil {
		defer ready.Close()
		stop := context.AfterFunc(ctx, func() { ready.Close() })
		defer stop()
		var raw syscall.RawConn
		if raw, err = ready.SyscallConn(); err == nil {
			rerr := raw.Read(func(uintptr) bool {
				err = a.f.Collect()
				return err != nil // false: call again when there are more
			})
			err = errors.Join(err, rerr)
		}
	}
	if err != nil && ctx.Err() == nil {
		a.o.Log.Warn("cannot read buffered packets", "err", err)
	}
}

// forget removes ended and idle flows once a second.
func (a *Agent) forget(ctx context.Context) {
	for range (feature.Loop{Every: time.Second, Later: true}).Turns(ctx) {
		c := a.beginCensus()
		if _, err := a.f.forget(a.o.EndedTimeout, a.o.IdleTimeout, &a.mu, c); err != nil {
			a.o.Log.Warn("cannot forget ended flows", "err", err)
		} else {
			a.endCensus(c)
		}
	}
}

// attend serves the connection of one agent until it ends.
func (a *Agent) attend(ctx context.Context, raw *accept.Conn) {
	defer raw.Close()
	c, err := peer.Accept(ctx, raw.Conn, a.o.TLS, a.own)
	if errors.Is(err, net.ErrClosed) {
		return // closed in favour of another connection
	}
	if err != nil {
		a.o.Log.Warn("agent rejected", "peer", raw.Peer, "err", err)
		return
	}
	defer c.Close()
	if !raw.Admit() {
		return // meanwhile closed in favour of another connection
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if p := a.o.Partner.Name; p != "" && c.Peer.Role == peer.LBAgent && c.Peer.Name == p {
		a.hearPartner(c)
		return
	}
	number := c.Peer.Number
	if err := a.prove(c); err != nil {
		a.o.Log.Warn("cannot locate backend of earlier weir", "name", c.Peer.Name, "number", number, "err", err)
	}
	a.mu.Lock()
	err = a.admits(c.Peer)
	if err == nil {
		err = a.duplicate(c)
	}
	if err == nil {
		err = a.keep(c.Peer)
	}
	if err != nil {
		a.mu.Unlock()
		a.o.Log.Warn("agent rejected", "name", c.Peer.Name, "number", number, "err", err)
		_ = c.Tell(peer.Peers{Rejected: err.Error()})
		return
	}
	if before := a.backends[number]; before != nil {
		before.Close() // the backend's agent restarted, or only its side lost the connection
		a.loads.Forget(number)
	}
	a.backends[number] = c
	a.mu.Unlock()
	a.kicked()
	var wg sync.WaitGroup
	over, cancel := context.WithCancel(ctx)
	defer func() {
		c.Close() // ends a blocked write
		cancel()
		wg.Wait()
	}()
	wg.Go(func() { c.Deliver(over, func(p peer.Peers) { a.tell(c, p) }) })
	c.Handle(peer.Control{Register: func(r peer.Registration) { a.register(c, r) },
		Flows: func(records []peer.FlowRecord, last bool) { a.hearOwned(c, records, last) }})
	for {
		f, err := c.Receive()
		if err != nil {
			break
		}
		if f.IsLoad {
			a.noteLoad(c, f)
			continue
		}
		if err := a.handle(c, f); err != nil {
			a.o.Log.Warn("cannot process message of backend", "backend", c.Peer.Name, "message", f.Message.String(), "flow", f.Flow.String(), "err", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.backends[number] == c {
		delete(a.backends, number)
		a.left[number] = time.Now()
		if err := a.f.names.Leave(number, kernel.Monotonic()); err != nil {
			a.o.Log.Warn("cannot note the time of a disconnection", "name", c.Peer.Name, "err", err)
		}
		a.loads.Forget(number)
		a.kicked()
	}
}

func (a *Agent) noteLoad(c *peer.Conn, f peer.Frame) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.backends[c.Peer.Number] == c { // otherwise it is replaced
		a.loads.Note(c.Peer.Number, f.Flow.Service, f.Load)
	}
}

// after runs f in d, holding mu, unless Serve has returned by then.
func (a *Agent) after(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !a.ended {
			f()
		}
	})
}

// end stops the timers and waits for locating and checking. The caller of Serve may then close the data path.
func (a *Agent) end() {
	a.mu.Lock()
	a.ended = true
	for _, t := range a.timers {
		t.Stop()
	}
	a.mu.Unlock()
	a.asides.Wait()
}

// expire ends the buffering of a flow at its deadline and starts the timeout of the move. The caller holds mu.
func (a *Agent) expire(k Key, epoch move.Epoch) {
	if a.timers[k] == nil {
		return
	}
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Epoch == epoch {
			fl.Expire()
		}
	})
	if err == nil {
		_, err = a.f.Flush(k)
	}
	if err != nil && !errors.Is(err, errNoFlow) {
		a.o.Log.Warn("cannot release buffered packets", "flow", k.Client, "err", err)
	}
	a.timers[k] = a.after(a.o.MoveTimeout, func() { a.lapse(k, epoch) })
}

func (a *Agent) lapse(k Key, epoch move.Epoch) {
	delete(a.timers, k)
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Epoch == epoch {
			fl.Lapse()
		}
	})
	if err != nil && !errors.Is(err, errNoFlow) {
		a.o.Log.Warn("cannot end move", "flow", k.Client, "err", err)
	}
}
