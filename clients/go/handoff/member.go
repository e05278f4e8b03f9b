// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/ratelog"
)

// Options say who this process is.
type Options struct {
	Service string // as weir.yaml, or weir handoff keep --allow, names it
	Name    string // of this member: a slot's number, say. The next process of this name is its replacement
	Keeper  string // the keeper's socket; "": $WEIR_HANDOFF_SOCKET, else DefaultSocket

	// Orphans has this member take sessions of dead members of other names, too, when
	// no replacement came for them in time.
	Orphans bool
	// Stay keeps sessions here when a newer process of the same name is ready, in place
	// of handing them over at once: see Member.Replaced. New connections are its either way.
	Stay bool
	// Proof is how long a newer process of the same name has to live before this one ends; default 1 s. Replaced and Accept tell
	// of it only then, and only when all sessions are handed over or have ended. If it dies or hangs before, this process goes on.
	Proof time.Duration
	// Balances has this member hear what waits for the others: see Balancer.
	Balances bool
	// Window is how many bytes may be read without a Commit; default 128 KiB. It must be
	// larger than the largest message of which a part may be left unparsed.
	Window int
	// Timeout is how long Transfer and the like wait for the keeper; default 5 s.
	Timeout time.Duration
	// Listen makes sockets; plain TCP whatever it says of MPTCP.
	Listen net.ListenConfig
	Log    *slog.Logger // default: nothing is logged
}

// Member is this process as a member of a service. It is safe for concurrent use.
type Member struct {
	o        Options
	conn     atomic.Pointer[wire.Conn] // nil: no keeper
	maxState atomic.Uint64             // bytes
	board    *wire.Board               // nil: there is none
	boards   atomic.Bool               // this keeper reads it
	standby  atomic.Bool               // this keeper knows members that stand by
	replaced chan struct{}
	done     chan struct{}

	// Lock order: handing, mu, Listener.mu or PacketConn.mu, Session.writing, Session.mu; then the locks of package wire. Session.mu
	// is let go before mu is taken: see Session.forget.
	handing sync.RWMutex // held for reading while sessions are handed over

	mu        sync.Mutex
	seq       uint32
	calls     map[uint32]*call
	sessions  map[uint64]*Session
	listeners []*Listener
	packets   []*PacketConn
	labels    map[string]bool // of listeners and packet sockets that are open
	load      ownLoad
	loads     map[string]uint32 // of other members, as they say
	ready     bool
	over      bool   // replaced or closed
	proving   *proof // of a successor; nil: there is none
	closing   sync.Once
}

// Join connects to the keeper. The member gets sessions after Ready.
func Join(ctx context.Context, o Options) (*Member, error) {
	if !wire.ValidName(o.Service) || !wire.ValidName(o.Name) {
		return nil, fmt.Errorf("service %q, member %q: Options want a name for both, of 1 to %d printable characters without spaces", o.Service, o.Name, wire.MaxName)
	}
	if o.Window == 0 {
		o.Window = 128 << 10
	}
	if o.Proof == 0 {
		o.Proof = time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	o.Log = ratelog.Limit(o.Log)
	o.Keeper = wire.Socket(o.Keeper)
	o.Listen.SetMultipathTCP(false)
	m := &Member{o: o, calls: map[uint32]*call{}, loads: map[string]uint32{}, labels: map[string]bool{}, sessions: map[uint64]*Session{}, replaced: make(chan struct{}), done: make(chan struct{})}
	var err error
	if m.board, err = wire.NewBoard(); err != nil {
		o.Log.Warn("commits go by messages", "err", err)
	}
	c, err := m.dial(ctx)
	if err != nil {
		m.closeBoard()
		return nil, err
	}
	m.conn.Store(c)
	go m.run(c)
	return m, nil
}

// Replaced is closed when a newer process of this name has proved itself (Options.Proof) and, unless
// Options.Stay is set, has all sessions that did not end here.
func (m *Member) Replaced() <-chan struct{} { return m.replaced }

// Ready has the keeper give sessions to this member, and tell an older one of its
// name that it is replaced. Call it when all listeners are there.
func (m *Member) Ready() error {
	m.mu.Lock()
	m.ready = true
	m.mu.Unlock()
	// Answered: when this returns, others may transfer sessions here.
	_, err := m.call(&wire.Message{Type: wire.Ready, Number: 1}, nil)
	return err
}

// Sessions are those that this member has.
func (m *Member) Sessions() []*Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Session, 0, len(m.sessions))
	for _, s := range m.sessions {
		out = append(out, s)
	}
	return out
}

// Transfer gives a session to another member: to is its name, "" whoever is ready and
// has the fewest. Everything read must be accounted for by state; what was read and
// not yet parsed belongs into it, or see TransferExcept. On success the session is
// the other's: Read and Write of it return ErrMoved here. On an error it is still ours.
func (m *Member) Transfer(s *Session, to string, state []byte) error {
	return m.transfer(s, to, 0, state, false)
}

// TransferExcept is Transfer for a state that does not account for the last unparsed
// bytes that were read: the other will read them again.
func (m *Member) TransferExcept(s *Session, to string, unparsed int, state []byte) error {
	return m.transfer(s, to, unparsed, state, false)
}

// TransferCommitted moves a session at its last commit, whatever is being done with
// it here: that is cut off, as by a crash, and done again by the other.
func (m *Member) TransferCommitted(s *Session, to string) error {
	return m.transfer(s, to, 0, nil, true)
}

// HandOver hands everything over to another member, at the last commits: sessions, and
// to a newer process of the same name listeners with their queued connections and
// packet sockets with their unread datagrams. Listeners stop here. The error tells of
// sessions that stay.
func (m *Member) HandOver(to string) error {
	m.handing.RLock() // before Accept can end
	defer m.handing.RUnlock()
	m.stopListening()
	return errors.Join(m.transferAll(to)...)
}

// Close leaves the service: sessions that are not closed are for other members, or
// wait for one, as if this process had ended.
func (m *Member) Close() error {
	err := net.ErrClosed
	m.closing.Do(func() {
		m.stopListening()
		left := m.Sessions()
		for _, s := range left {
			s.relinquish()
		}
		err = m.post(&wire.Message{Type: wire.Leave})
		for _, s := range left {
			s.giveSlot() // not before: others would commit there
		}
		close(m.done)
		if c := m.conn.Swap(nil); c != nil {
			c.Close()
		}
	})
	return err
}

// Forget is Close of a service that ends for good: the keeper lets go of this member's sockets, too. Ports are free at once, and
// sessions that are left end; hand them over first where another member is to have them.
func (m *Member) Forget() error {
	m.mu.Lock()
	listeners, packets := m.listeners, m.packets
	m.mu.Unlock()
	m.stopListening()
	var errs []error
	for _, s := range m.Sessions() {
		if err := s.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	for _, l := range listeners {
		errs = append(errs, m.post(&wire.Message{Type: wire.Drop, Session: l.id}))
	}
	for _, p := range packets {
		errs = append(errs, m.post(&wire.Message{Type: wire.Drop, Session: p.id}))
	}
	return errors.Join(append(errs, m.Close())...)
}

func (m *Member) closeBoard() {
	if m.board != nil {
		m.board.Close()
	}
}

// handedOver waits until no hand-over is going on: a process that ends as soon as it
// hears that it is replaced has then given away everything.
func (m *Member) handedOver() {
	m.handing.Lock()
	defer m.handing.Unlock()
}

func (m *Member) isDone() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

// stopListening lets go of the listeners and packet sockets, which the keeper and a
// replacement still have, and waits until all is kept that was accepted.
func (m *Member) stopListening() {
	m.mu.Lock()
	m.over = true
	listeners, packets := m.listeners, m.packets
	m.mu.Unlock()
	m.post(&wire.Message{Type: wire.Ready}) // gets no more
	for _, l := range listeners {
		l.stop(ErrReplaced)
	}
	for _, p := range packets {
		p.stop()
	}
	for _, l := range listeners {
		l.running.Wait() // a connection that it has just accepted is one of the sessions
	}
}

// moveOnRequest does what weir handoff send asks for.
func (m *Member) moveOnRequest(id uint64, to string) {
	for _, s := range m.Sessions() {
		if id != 0 && s.id != id {
			continue
		}
		if err := m.TransferCommitted(s, to); err != nil && !errors.Is(err, ErrMoved) {
			m.o.Log.Warn("a session stays", "session", s.id, "to", to, "err", err)
		}
	}
}
