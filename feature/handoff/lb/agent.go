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
	"github.com/weir-project/weir/feature/handoff/lb/quota"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/ratelog"
)

// AgentOptions say how an agent of a load balancer is to be.
type AgentOptions struct {
	Name     string // in its certificate
	TLS      *peer.Identity
	Backends []Backend // whose agents may connect
	// Manage has the agent tell the data path of backends: those of Managed, and with Register those that register themselves. Else
	// [DataPath.SetBackends] is the caller's.
	Manage   bool
	Managed  []Managed
	Register bool
	Services []Service // as backends call them when they register
	// Partner is another load balancer beside this one, with which flows are exchanged; "" for none.
	Partner Partner
	// Down is how long a backend's agent may say nothing until the backend gets no new flows; default 3 s.
	AgentTimeout time.Duration
	// Hold is how long packets of a session that moves wait at most; default 1 s. Lapse is how long a move may take of which
	// nobody says anything; default 10 s.
	BufferTimeout, MoveTimeout time.Duration
	// Ended and Idle are how long flows stay known that have ended, and of which nothing is seen; default 5 s and 1 h.
	EndedTimeout, IdleTimeout time.Duration
	Log                       *slog.Logger // default: nothing is logged
	// Step is called after each step of a move, by which experiments kill the agent there; nil in use. [Steps] names them.
	Step func(name string)
}

// Agent lets backends move sessions: it is the load balancer of package move. The data path needs it for nothing else.
type Agent struct {
	f     *DataPath
	o     AgentOptions
	own   peer.Hello
	names map[move.Backend]string

	pair    *pairing      // nil: without a partner
	openFor time.Duration // moves of the partner's; a test has less patience

	// Lock order: mu, pairing.mu, DataPath.mu, the lock of package packetbuf, bufferDevice.mu. The lock of package peer comes last.
	mu        sync.Mutex
	backends  map[move.Backend]*peer.Conn
	timers    map[Key]*time.Timer
	early     map[Key]*early
	loads     map[loadKey]uint32
	members   map[move.Backend]*member
	news      bool // of a member, that the others have not been told
	kick      chan struct{}
	left      map[move.Backend]time.Time // when agents went
	forgotten map[move.Backend]string    // backends that have been away for long: the partner may forget them later
	began     time.Time
	reports   quota.Reports
	unasked   bool           // too many flows are known by backends' packets alone
	startup   *startup       // the data path has begun anew, and not all backends have said which sessions are theirs; else nil
	ended     bool           // Serve has: nothing is done with the data path any more, which may be closed
	asides    sync.WaitGroup // goroutines that find and check backends
	routes    routes         // of tend alone
}

// NewAgent makes an agent of a data path, which knows the backends already: see [DataPath.SetBackends].
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
		members: map[move.Backend]*member{}, kick: make(chan struct{}, 1), loads: map[loadKey]uint32{}, left: map[move.Backend]time.Time{}, forgotten: map[move.Backend]string{}, began: time.Now(), openFor: max(openFor, 2*o.MoveTimeout)}
	for _, h := range o.Backends {
		a.names[h.Number] = h.Name
	}
	for _, h := range o.Managed {
		if a.members[h.Number] != nil || h.Number == 0 || h.Number > MaxBackends || h.Name == "" {
			return nil, fmt.Errorf("backend %q, number %d: a backend has a name, and a number of its own from 1 to %d", h.Name, h.Number, MaxBackends)
		}
		a.names[h.Number] = h.Name
		h.Address = h.Address.Unmap()
		a.members[h.Number] = &member{Managed: h, told: &h}
	}
	f.bufferFor, f.ended = a.o.BufferTimeout+slack, uint32(min(a.o.EndedTimeout.Milliseconds(), math.MaxUint32))
	f.reclaim = uint16(min(math.Ceil((a.openFor - openFor).Seconds()), math.MaxUint16))
	if o.Partner.Name != "" {
		a.pair = newPairing()
	}
	a.beginStartup()
	return a, nil
}

// Serve speaks with backends until ctx is done.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	if err := a.resumeMoves(); err != nil {
		return fmt.Errorf("going on with moves that were under way: %w", err)
	}
	var wg sync.WaitGroup
	defer a.end()
	defer wg.Wait()
	if a.o.Partner.Name != "" {
		if err := a.exchange(ctx, &wg); err != nil {
			return err
		}
	}
	go a.o.TLS.Watch(ctx, a.o.Name, a.o.Log) // not waited for: files may be where nobody answers
	wg.Go(func() { a.collect(ctx) })
	wg.Go(func() { a.forget(ctx) })
	wg.Go(func() { a.tend(ctx) })
	in := accept.New(l, accept.Options{Name: "agents", Log: a.o.Log})
	for {
		raw, err := in.Next()
		if err != nil { // closed
			cancel()
			return nil
		}
		wg.Go(func() { a.attend(ctx, raw) })
	}
}

// collect takes buffered packets out of the device's queue.
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
				return err != nil // else until there is more
			})
			err = errors.Join(err, rerr)
		}
	}
	if err != nil && ctx.Err() == nil {
		a.o.Log.Warn("buffered packets cannot be read", "err", err)
	}
}

// forget has the data path forget what has ended.
func (a *Agent) forget(ctx context.Context) {
	for range (feature.Loop{Every: time.Second, Later: true}).Turns(ctx) {
		c := a.beginCensus()
		if _, err := a.f.forget(a.o.EndedTimeout, a.o.IdleTimeout, &a.mu, c); err != nil {
			a.o.Log.Warn("flows that have ended stay known", "err", err)
		} else {
			a.endCensus(c)
		}
	}
}

// attend speaks with one backend, as long as it stays.
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
	if p := a.o.Partner.Name; p != "" && c.Peer.Role == peer.LBAgent && c.Peer.Name == p {
		a.hearPartner(c)
		return
	}
	number := c.Peer.Number
	a.mu.Lock()
	err = a.admits(c.Peer)
	if err == nil {
		err = a.duplicate(c)
	}
	if err != nil {
		a.mu.Unlock()
		a.o.Log.Warn("an agent is refused", "name", c.Peer.Name, "number", number, "err", err)
		_ = c.Tell(peer.Peers{Rejected: err.Error()})
		return
	}
	if before := a.backends[number]; before != nil {
		before.Close() // the backend's agent has started anew, or its connection was broken for it alone
		a.unload(number)
	}
	a.backends[number] = c
	a.mu.Unlock()
	a.kicked()
	c.Handle(peer.Control{Register: func(r peer.Registration) { a.register(c, r) },
		Flows: func(records []peer.FlowRecord, last bool) { a.hearOwned(c, records, last) }})
	for {
		f, err := c.Receive()
		if err != nil {
			break
		}
		if f.IsLoad {
			a.noteLoad(c, f.Flow.Service, f.Load)
			continue
		}
		if err := a.handle(c, f); err != nil {
			a.o.Log.Warn("a message of a backend", "backend", c.Peer.Name, "message", f.Message.String(), "flow", f.Flow.String(), "err", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.backends[number] == c {
		delete(a.backends, number)
		a.left[number] = time.Now()
		a.unload(number)
		a.kicked()
	}
}

// after runs f in d, holding mu, unless the agent has ended by then.
func (a *Agent) after(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !a.ended {
			f()
		}
	})
}

// end stops the timers: the caller closes the data path when Serve returns.
func (a *Agent) end() {
	a.mu.Lock()
	a.ended = true
	for _, t := range a.timers {
		t.Stop()
	}
	a.mu.Unlock()
	a.asides.Wait()
}

// expire ends holding at its deadline, and later the move. a.mu is held.
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
		a.o.Log.Warn("packets stay buffered", "flow", k.Client, "err", err)
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
		a.o.Log.Warn("a move stays open", "flow", k.Client, "err", err)
	}
}
