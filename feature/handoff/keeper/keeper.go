// SPDX-License-Identifier: Apache-2.0

// Package keeper keeps duplicates of the live sockets of services, with the position
// and the state that each stands at, so that a session outlives its member: the next
// member of the service goes on with it where the last one stopped, to the byte.
// docs/HANDOFF.md describes the protocol and its promises.
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

// Options say what a keeper keeps, and for whom. The zero value is for root and the
// keeper's own user, with the limits below.
type Options struct {
	// Allow says whether a process is a member of a service, under a name if that is not empty; nil says no. Root, the user
	// whom the keeper runs as, and whom Limits.Allow names need no leave.
	Allow func(ctx context.Context, service, name string, p Peer) error

	Hold        time.Duration // how long a session waits for a member before it is reset; default 30 s
	Grace       time.Duration // how long it waits for one of its own name, where another would take it; default 1 s
	MaxSessions int           // sockets of one user in one service; default 10,000
	MaxState    int64         // bytes of state of one session; default 1 MiB
	MaxTotal    int64         // bytes of state of all, in shares; default 256 MiB

	// Store takes, as the keeper ends, the sockets that wait for a member, for the next
	// keeper's Inherit; nil: they are reset. See the function Store.
	Store func(fds []int) error
	Log   *slog.Logger // default: nothing is logged
}

// Limits that are not configured.
const (
	helloTime       = 5 * time.Second // for a process to say who it is
	slowTime        = 2 * time.Second // for a member to answer for what it was given
	drainTime       = 100 * time.Millisecond
	lastWords       = 50 * time.Millisecond // of members, when the keeper ends
	missedTime      = time.Second           // for one that has come back to keep what it was given before
	againTime       = 2 * time.Second       // between offers of a session that waits to a member that has refused it
	tick            = 100 * time.Millisecond
	connectionsEach = 64 // connections of one user; root is not limited
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

// errTaken says that a keeper is there already.
var errTaken = fmt.Errorf("another keeper answers: %w", accept.ErrAnswers)

// Keeper keeps sessions. Make one with New.
type Keeper struct {
	Options

	mu       sync.Mutex // after the turns of fetches, before the locks of package wire; tolls.mu and fetches.mu are held alone
	services map[string]*service
	sessions map[uint64]*session
	state    int64 // bytes of state, and of what slots may have
	holdings map[shareholder]holding
	serial   uint64
	refused  uint64           // hellos of processes that are no members
	queued   map[uint32]int64 // bytes that wait for a user's processes to read
	closed   bool
	rules    Rules  // of Limits
	changes  uint32 // of the limits that Welcome tells, as members were told last

	tolls   tolls
	fetches fetches
}

// service is a service as the keeper knows it: by the members that come.
type service struct {
	name     string
	members  []*member // by age, without those that are gone
	sessions map[uint64]*session
	orphans  map[*session]bool
	counts   Counts
	// Members whose connection has ended before they answered for all that they were given: see missed.
	unanswered map[*member]bool
	able       int // members of this server that are ready, as agents were told last
}

// New makes a keeper.
func New(o Options) *Keeper {
	o.setDefaults()
	return &Keeper{Options: o, services: map[string]*service{}, sessions: map[uint64]*session{}, holdings: map[shareholder]holding{}, queued: map[uint32]int64{}}
}

// Listen makes the socket that members connect to, at a path, or at an abstract name
// that begins with @. Everybody may connect: who may do what is decided by who asks.
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
			return nil, fmt.Errorf("the socket's directory: %w", err)
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

// ListenAgain is [Listen]. It waits briefly for a keeper that ends.
func ListenAgain(ctx context.Context, log *slog.Logger, path string) (*net.UnixListener, error) {
	l, err := accept.Again(ctx, log, path, func() (net.Listener, error) { return Listen(path) })
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// endTime is how long the keeper's end waits for its connections: a thread of one may be held up by a stranger.
const endTime = 3 * time.Second

// wait waits for connections to end, but not for long.
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
		k.Log.Warn("connections of members have not ended, going on", "waited", endTime)
	}
}

// Serve serves members until ctx is done. Their sessions are theirs then as before,
// without a keeper; those that wait for a member go to Options.Store, else are reset.
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

// watch does what time brings: orphans find members of other names, or an end.
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

// close lets go of everything. Sessions that nobody has end.
func (k *Keeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if err := k.bequeath(); err != nil {
		k.Log.Warn("what waits for a member cannot be left to the next keeper", "err", err)
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

// forget drops a service that has nothing and never did anything.
func (k *Keeper) forget(s *service) {
	if len(s.members) == 0 && len(s.sessions) == 0 && s.counts == (Counts{}) {
		delete(k.services, s.name)
	}
}
