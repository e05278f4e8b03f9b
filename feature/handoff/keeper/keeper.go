// SPDX-License-Identifier: Apache-2.0

// Package keeper keeps duplicates of services' live sockets, with the position and application state of each. A
// session thereby outlives its member: the service's next member continues at the exact byte.
// docs/HANDOFF-PROTOCOL.md describes the protocol and its guarantees.
package keeper

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/ratelog"
)

// Options configure a keeper. The zero value admits root and the keeper's own user, with the defaults below.
type Options struct {
	// Allow returns nil if a process may be a member of a service, under a name if name is not empty. A nil Allow
	// rejects everyone. Root, the keeper's own user, and processes allowed by Limits.Allow do not need it.
	Allow func(ctx context.Context, service, name string, p Peer) error

	Hold        time.Duration // maximum wait of a session for a member, before it is reset; default 30 s
	Grace       time.Duration // wait for a member of the session's own name, before members of other names may take it; default 1 s
	MaxSessions int           // sockets of one user in one service; default 10,000
	MaxState    int64         // bytes of state of one session; default 1 MiB
	MaxTotal    int64         // bytes of state of all sessions, divided by shares; default 256 MiB

	// Store keeps the waiting sockets when the keeper exits, for the next keeper's Inherit. With nil they are reset.
	// See the function Store.
	Store func(fds []int) error
	Log   *slog.Logger // default: no logging
}

// Limits without a configuration key.
const (
	helloTime       = 5 * time.Second // for a process to send Hello
	slowTime        = 2 * time.Second // for a member to answer for given sessions
	drainTime       = 100 * time.Millisecond
	lastWords       = 50 * time.Millisecond // for members' last messages when the keeper exits
	missedTime      = time.Second           // for a reconnected process to keep its earlier sessions again
	againTime       = 2 * time.Second       // between two offers of a waiting session to a member that has rejected it
	tick            = 100 * time.Millisecond
	connectionsEach = 64 // connections of one user, except root
)

func (o *Options) setDefaults() {
	if o.Hold == 0 {
		o.Hold = 30 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = time.Second
	}
	if o.MaxSessions == 0 {
		o.MaxSessions = 10_000
	}
	if o.MaxState == 0 {
		o.MaxState = 1 << 20
	}
	if o.MaxTotal == 0 {
		o.MaxTotal = 256 << 20
	}
	o.Log = ratelog.Limit(o.Log)
}

// errTaken means another keeper is running.
var errTaken = fmt.Errorf("another keeper answers: %w", accept.ErrAnswers)

// Keeper keeps sessions. Create it with New.
type Keeper struct {
	Options

	mu       sync.Mutex // lock order: turns of fetches, mu, the locks of package wire. tolls.mu and fetches.mu are held alone.
	services map[string]*service
	sessions map[uint64]*session
	state    int64 // bytes of state, including reserved slots
	holdings map[shareholder]holding
	serial   uint64
	refused  uint64           // Hellos of processes that are not members
	queued   map[uint32]int64 // unread bytes in queues, by user
	closed   bool
	rules    Rules  // of Limits
	changes  uint32 // number of the latest change of the limits sent in Welcome

	tolls   tolls
	fetches fetches
}

// service is a service with members or sessions in this keeper.
type service struct {
	name     string
	members  []*member // oldest first, without disconnected ones
	sessions map[uint64]*session
	orphans  map[*session]bool
	counts   Counts
	// Disconnected members with unanswered sessions: see missed.
	unanswered map[*member]bool
	able       int // number of this host's ready members, as last sent to the agents
}

// New returns a keeper.
func New(o Options) *Keeper {
	o.setDefaults()
	return &Keeper{Options: o, services: map[string]*service{}, sessions: map[uint64]*session{}, holdings: map[shareholder]holding{}, queued: map[uint32]int64{}}
}

// Listen creates the socket for members, at a path, or at an abstract name beginning with @. Everybody may connect:
// requests are authorized by the peer's credentials.
func Listen(path string) (*net.UnixListener, error) {
	if path == "" {
		path = wire.DefaultSocket
	}
	if err := accept.CheckPath(path); err != nil {
		return nil, err
	}
	abstract := path[0] == '@'
	if !abstract {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, fmt.Errorf("create the socket's directory: %w", err)
		}
	}
	if c, err := net.Dial("unixpacket", path); err == nil {
		err := accept.CheckServer(c, path, wire.UIDEnv)
		c.Close()
		if err != nil {
			return nil, fmt.Errorf("the socket for members: %w, or choose another socket", err)
		}
		return nil, fmt.Errorf("%w on %s: stop it, or choose another socket", errTaken, path)
	}
	if !abstract {
		if err := accept.RemoveStale(path); err != nil {
			return nil, err
		}
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("the socket %s: %w", path, err)
	}
	if !abstract {
		if err := accept.Permit(path, -1, 0o666); err != nil {
			l.Close()
			return nil, err
		}
	}
	return l, nil
}

// ListenAgain is [Listen]. It waits briefly for an exiting keeper.
func ListenAgain(ctx context.Context, log *slog.Logger, path string) (*net.UnixListener, error) {
	l, err := accept.Again(ctx, log, path, func() (net.Listener, error) { return Listen(path) })
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// endTime limits the wait for connections at exit: another user's process may block a connection's thread.
const endTime = 3 * time.Second

// wait waits for connections to end, for at most endTime.
func (k *Keeper) wait(members *sync.WaitGroup) {
	done := make(chan struct{})
	go func() {
		members.Wait()
		close(done)
	}()
	timer := time.NewTimer(endTime)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		k.Log.Warn("member connections still open, exiting anyway", "waited", endTime)
	}
}

// Serve serves members until ctx is done. Members then keep their sessions without a keeper. Waiting sessions go to
// Options.Store, or are reset.
func (k *Keeper) Serve(ctx context.Context, l *net.UnixListener) error {
	var members sync.WaitGroup
	defer k.close()
	defer k.wait(&members)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	members.Go(func() { k.watch(ctx) })
	in := accept.New(l, accept.Options{Name: "keeper", PerPeer: connectionsEach, Handshake: helloTime, Held: true, Log: k.Log})
	for {
		c, err := in.Next()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil { // closed
			return err
		}
		members.Go(func() { k.connection(ctx, c) })
	}
}

// watch runs the timers: it expires sessions, and finds members for orphans.
func (k *Keeper) watch(ctx context.Context) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			k.mu.Lock()
			for _, s := range k.services {
				k.expire(s, now)
				k.prove(s, now)
				k.overdue(s, now)
				k.missed(s, now)
				k.assignOrphans(s, now)
				k.forget(s)
			}
			k.mu.Unlock()
		}
	}
}

// close releases everything. Sessions without an owner end.
func (k *Keeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if err := k.bequeath(); err != nil {
		k.Log.Warn("cannot leave waiting sessions to the next keeper", "err", err)
	}
	for _, s := range k.sessions {
		k.remove(s, s.owner == nil)
	}
}

func (k *Keeper) service(name string) *service {
	s := k.services[name]
	if s == nil {
		s = &service{name: name, sessions: map[uint64]*session{}, orphans: map[*session]bool{}, unanswered: map[*member]bool{}}
		k.services[name] = s
	}
	return s
}

// forget removes a service without members, sessions and counts.
func (k *Keeper) forget(s *service) {
	if len(s.members) == 0 && len(s.sessions) == 0 && s.counts == (Counts{}) {
		delete(k.services, s.name)
	}
}
