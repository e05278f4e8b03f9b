// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// AgentOptions say how an agent of a front end is to be.
type AgentOptions struct {
	Name  string // in its certificate
	TLS   *tls.Config
	Hosts []Host // whose agents may connect
	// Hold is how long packets of a session that moves wait at most; default 1 s. Lapse is how long a move may take of which
	// nobody says anything; default 10 s.
	Hold, Lapse time.Duration
	// Ended and Idle are how long flows stay known that have ended, and of which nothing is seen; default 5 s and 1 h.
	Ended, Idle time.Duration
	Log         *slog.Logger // default: nothing is logged
}

// Agent lets hosts move sessions: it is the front end of package move. The data path needs it for nothing else.
type Agent struct {
	f     *Front
	o     AgentOptions
	own   peer.Hello
	names map[move.Host]string

	mu    sync.Mutex
	hosts map[move.Host]*peer.Conn
	// flipped is which life of its owner's agent has flipped a flow: until that has ended, nobody gets it back.
	flipped map[Key]uint64
	timers  map[Key]*time.Timer
}

// NewAgent makes an agent of a data path, which knows the hosts already: see [Front.SetHosts].
func NewAgent(f *Front, o AgentOptions) (*Agent, error) {
	for _, d := range []struct {
		of  *time.Duration
		def time.Duration
	}{{&o.Hold, time.Second}, {&o.Lapse, 10 * time.Second}, {&o.Ended, 5 * time.Second}, {&o.Idle, time.Hour}} {
		if *d.of == 0 {
			*d.of = d.def
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	a := &Agent{f: f, o: o, own: peer.Hello{Role: peer.FrontAgent, Instance: peer.NewInstance(), Name: o.Name}, names: map[move.Host]string{},
		hosts: map[move.Host]*peer.Conn{}, flipped: map[Key]uint64{}, timers: map[Key]*time.Timer{}}
	for _, h := range o.Hosts {
		a.names[h.Number] = h.Name
	}
	return a, nil
}

// Serve speaks with hosts until ctx is done.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { a.collect(ctx) })
	wg.Go(func() { a.forget(ctx) })
	for {
		raw, err := l.Accept()
		if err != nil {
			cancel()
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		wg.Go(func() { a.attend(ctx, raw) })
	}
}

// collect takes parked packets out of the device's queue.
func (a *Agent) collect(ctx context.Context) {
	for ctx.Err() == nil {
		p := []unix.PollFd{{Fd: int32(a.f.Ready()), Events: unix.POLLIN}}
		if n, err := unix.Poll(p, 100); n == 0 || err != nil {
			continue
		}
		if err := a.f.Collect(); err != nil {
			a.o.Log.Warn("parked packets cannot be read", "reason", err)
			return
		}
	}
}

// forget has the data path forget what has ended.
func (a *Agent) forget(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if _, err := a.f.Forget(a.o.Ended, a.o.Idle); err != nil {
			a.o.Log.Warn("flows that have ended stay known", "reason", err)
		}
		a.mu.Lock()
		for k := range a.flipped {
			if _, err := a.f.Flow(k); errors.Is(err, ErrNoFlow) {
				delete(a.flipped, k)
			}
		}
		a.mu.Unlock()
	}
}

// attend speaks with one host, as long as it stays.
func (a *Agent) attend(ctx context.Context, raw net.Conn) {
	c, err := peer.Accept(ctx, raw, a.o.TLS, a.own)
	if err != nil {
		a.o.Log.Warn("an agent is refused", "reason", err)
		return
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	number := c.Peer.Number
	if c.Peer.Role != peer.HostAgent || a.names[number] != c.Peer.Name || number == 0 {
		a.o.Log.Warn("an agent is refused", "name", c.Peer.Name, "number", number, "reason", "it is none of the hosts of this front end")
		return
	}
	a.mu.Lock()
	if before := a.hosts[number]; before != nil {
		before.Close() // the host's agent has started anew, or its connection was broken for it alone
	}
	a.hosts[number] = c
	a.mu.Unlock()
	for {
		f, err := c.Receive()
		if err != nil {
			break
		}
		if err := a.handle(c, f); err != nil {
			a.o.Log.Warn("a message of a host", "host", c.Peer.Name, "message", f.Message.String(), "flow", f.Flow.String(), "reason", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hosts[number] == c {
		delete(a.hosts, number)
	}
}

// handle does what a host asks for. All of it happens one after the other.
func (a *Agent) handle(c *peer.Conn, in peer.Frame) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := c.Peer.Number
	if a.hosts[from] != c {
		return nil // of a life that has ended: who asks has nobody to hear the answer
	}
	k := Key{Client: in.Flow.Client, Service: int(in.Flow.Service)}
	var answers [2]move.Message
	var owner move.Host // before
	now, err := a.f.Change(k, func(fl *Flow) {
		owner = fl.Owner
		answers = fl.Receive(from, in.Message, a.gone(k, owner))
	})
	if errors.Is(err, ErrNoFlow) { // the client has ended it, or it never was
		answers = (&move.Flow{}).Receive(from, in.Message, false)
	} else if err != nil {
		return err
	}
	if answers[0].Kind == 0 {
		return fmt.Errorf("%s is not for front ends", in.Message.Kind)
	}
	if err == nil && answers[0].OK {
		if err := a.follow(k, now, c, in.Message.Kind); err != nil {
			return err
		}
	}
	return errors.Join(a.send(from, in, answers[0]), a.send(owner, in, answers[1]))
}

// follow has the data path do what was decided.
func (a *Agent) follow(k Key, now Flow, c *peer.Conn, kind move.Kind) error {
	if t := a.timers[k]; t != nil {
		t.Stop()
		delete(a.timers, k)
	}
	switch kind {
	case move.Hold:
		if err := a.f.Park(k); err != nil {
			return err
		}
		a.timers[k] = time.AfterFunc(a.o.Hold, func() { a.expire(k, now.Epoch) })
		return nil
	case move.Flip:
		a.flipped[k] = c.Peer.Instance
	}
	_, err := a.f.Unpark(k)
	return err
}

// gone says that the life of the owner's agent has ended that flipped the flow.
func (a *Agent) gone(k Key, owner move.Host) bool {
	h := a.hosts[owner]
	instance, known := a.flipped[k]
	return h == nil || known && h.Peer.Instance != instance
}

func (a *Agent) send(to move.Host, in peer.Frame, m move.Message) error {
	c := a.hosts[to]
	if m.Kind == 0 || c == nil {
		return nil
	}
	return c.Send(peer.Frame{Message: m, Flow: in.Flow, Instance: c.Peer.Instance})
}

// expire ends holding at its deadline, and later the move.
func (a *Agent) expire(k Key, epoch move.Epoch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timers[k] == nil {
		return
	}
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Epoch == epoch {
			fl.Expire()
		}
	})
	if err == nil {
		_, err = a.f.Unpark(k)
	}
	if err != nil && !errors.Is(err, ErrNoFlow) {
		a.o.Log.Warn("packets stay parked", "flow", k.Client, "reason", err)
	}
	a.timers[k] = time.AfterFunc(a.o.Lapse, func() { a.lapse(k, epoch) })
}

func (a *Agent) lapse(k Key, epoch move.Epoch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.timers, k)
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Epoch == epoch {
			fl.Lapse()
		}
	})
	if err != nil && !errors.Is(err, ErrNoFlow) {
		a.o.Log.Warn("a move stays open", "flow", k.Client, "reason", err)
	}
}
