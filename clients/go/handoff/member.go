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

// Options describe this process.
type Options struct {
	Service string // as named by weir.yaml, or by weir handoff keep --allow
	Name    string // of this member, such as a slot number; the next process of this name replaces it
	Keeper  string // the keeper's socket; "": $WEIR_HANDOFF_SOCKET, else DefaultSocket

	// Orphans makes this member also accept sessions of dead members of other names, if no
	// replacement started in time.
	Orphans bool
	// Stay keeps sessions here when a newer process of the same name is ready. By default they move
	// at once: see Member.Replaced. The newer process gets new connections in both cases.
	Stay bool
	// Proof is how long a newer process of the same name must live before this one ends; default 1
	// s. Only then do Replaced and Accept report it, and only when all sessions have moved or
	// ended. If it dies or hangs earlier, this process continues.
	Proof time.Duration
	// Balances subscribes to the loads of the other members: see Balancer.
	Balances bool
	// Window is the number of bytes readable without a Commit; default 128 KiB. It must exceed the
	// largest message with possibly unparsed parts.
	Window int
	// Timeout is how long calls such as Transfer wait for the keeper; default 5 s.
	Timeout time.Duration
	// Listen creates sockets. MPTCP is always off.
	Listen net.ListenConfig
	Log    *slog.Logger // default: no log
}

// Member is this process as a member of a service. It is safe for concurrent use.
type Member struct {
	o        Options
	conn     atomic.Pointer[wire.Conn] // nil: no keeper
	maxState atomic.Uint64             // bytes
	board    *wire.Board               // nil: no board
	boards   atomic.Bool               // this keeper reads the board
	standby  atomic.Bool               // this keeper supports members on standby
	replaced chan struct{}
	done     chan struct{}

	// Lock order: handing, mu, Listener.mu or PacketConn.mu, Session.writing, Session.mu, then the
	// locks of package wire. Session.mu is released before mu is taken: see Session.forget.
	handing sync.RWMutex // read-locked during a handover

	mu        sync.Mutex
	seq       uint32
	calls     map[uint32]*call
	sessions  map[uint64]*Session
	listeners []*Listener
	packets   []*PacketConn
	labels    map[string]bool // of open listeners and packet sockets
	load      ownLoad
	loads     map[string]uint32 // as reported by other members
	ready     bool
	over      bool   // replaced or closed
	proving   *proof // of a successor; nil: no successor
	closing   sync.Once
}

// Join connects to the keeper. The member receives sessions after Ready.
func Join(ctx context.Context, o Options) (*Member, error) {
	if !wire.ValidName(o.Service) || !wire.ValidName(o.Name) {
		return nil, fmt.Errorf("service %q, member %q: want names of 1 to %d printable characters without spaces", o.Service, o.Name, wire.MaxName)
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
		o.Log.Warn("no board, sending commits as messages", "err", err)
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

// Replaced returns a channel closed when a newer process of this name has proved itself
// (Options.Proof). Unless Options.Stay is set, that process then also has all sessions not ended
// here.
func (m *Member) Replaced() <-chan struct{} { return m.replaced }

// Ready makes the keeper give sessions to this member, and tells an older member of its name that
// it is replaced. Call it after all listeners are open.
func (m *Member) Ready() error {
	m.mu.Lock()
	m.ready = true
	m.mu.Unlock()
	// Wait for the answer: on return others may transfer sessions here.
	_, err := m.call(&wire.Message{Type: wire.Ready, Number: 1}, nil)
	return err
}

// Sessions returns the sessions of this member.
func (m *Member) Sessions() []*Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Session, 0, len(m.sessions))
	for _, s := range m.sessions {
		out = append(out, s)
	}
	return out
}

// Transfer gives a session to another member. to is its name; "" means the ready member with the
// fewest sessions. state must account for everything read: it includes bytes read but not parsed,
// or see TransferExcept. On success the other member owns the session, and Read and Write return
// ErrMoved here. On error it stays here.
func (m *Member) Transfer(s *Session, to string, state []byte) error {
	return m.transfer(s, to, 0, state, false)
}

// TransferExcept is Transfer for a state without the last unparsed bytes read. The other member
// reads them again.
func (m *Member) TransferExcept(s *Session, to string, unparsed int, state []byte) error {
	return m.transfer(s, to, unparsed, state, false)
}

// TransferCommitted moves a session as of its last commit. Work since then is cut off, as by a
// crash, and the other member repeats it.
func (m *Member) TransferCommitted(s *Session, to string) error {
	return m.transfer(s, to, 0, nil, true)
}

// HandOver gives everything to another member, as of the last commits. A newer process of the same
// name also gets listeners with their queued connections, and packet sockets with their unread
// datagrams. Listeners stop here. The error lists the sessions that stay.
func (m *Member) HandOver(to string) error {
	m.handing.RLock() // before Accept can end
	defer m.handing.RUnlock()
	m.stopListening()
	return errors.Join(m.transferAll(to)...)
}

// Close leaves the service. Open sessions go to other members or wait for one, as after the end of
// this process.
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
			s.giveSlot() // not earlier: others would commit there
		}
		close(m.done)
		if c := m.conn.Swap(nil); c != nil {
			c.Close()
		}
	})
	return err
}

// Forget is Close for a service that ends for good: the keeper also releases this member's sockets.
// Ports are free at once, and remaining sessions end. To keep them, hand them over first.
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

// handedOver waits for handovers in progress. A process that ends as soon as it is replaced has
// then given away everything.
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

// stopListening closes the listeners and packet sockets. The keeper and a replacement still have
// them. It waits until all accepted connections are kept.
func (m *Member) stopListening() {
	m.mu.Lock()
	m.over = true
	listeners, packets := m.listeners, m.packets
	m.mu.Unlock()
	m.post(&wire.Message{Type: wire.Ready}) // receive no more
	for _, l := range listeners {
		l.stop(ErrReplaced)
	}
	for _, p := range packets {
		p.stop()
	}
	for _, l := range listeners {
		l.running.Wait() // a connection just accepted is now one of the sessions
	}
}

// moveOnRequest carries out weir handoff send.
func (m *Member) moveOnRequest(id uint64, to string) {
	for _, s := range m.Sessions() {
		if id != 0 && s.id != id {
			continue
		}
		if err := m.TransferCommitted(s, to); err != nil && !errors.Is(err, ErrMoved) {
			m.o.Log.Warn("session not moved", "session", s.id, "to", to, "err", err)
		}
	}
}
