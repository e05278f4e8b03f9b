// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/accept"
)

// Listener accepts sessions: connections of its socket, and sessions transferred or left by other
// members. As a net.Listener it accepts plain connections: see Accept.
type Listener struct {
	m     *Member
	label string
	id    uint64
	tcp   *net.TCPListener
	own   bool        // Close also closes the member
	plain atomic.Bool // Accept was called

	conns   chan *Session
	stopped chan struct{}
	running sync.WaitGroup // accept loops; none starts after stop

	mu       sync.Mutex
	received []*Session
	notify   chan struct{}
	err      error // why it stopped
	sockets  []*net.TCPListener
	resumed  chan struct{} // closed on resume; nil: not paused
}

// Listen joins a service, listens and gets ready for sessions: Join, Member.Listen and Member.Ready
// in one. Closing the listener leaves the service. If the keeper has the socket of the predecessor,
// Listen continues with it and its queued connections.
func Listen(ctx context.Context, network, address string, o Options) (*Listener, error) {
	m, err := Join(ctx, o)
	if err != nil {
		return nil, err
	}
	l, err := m.Listen(ctx, network, address)
	if err == nil {
		l.own = true
		err = m.Ready()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return l, nil
}

// Listen listens at a TCP address. If the predecessor of this name had a socket of the same network
// and address, Listen continues with it.
func (m *Member) Listen(ctx context.Context, network, address string) (*Listener, error) {
	if !strings.HasPrefix(network, "tcp") {
		return nil, fmt.Errorf("listen %s: want tcp, tcp4 or tcp6: use ListenPacket for udp", network)
	}
	label := m.label(network, address)
	l, err := m.listen(ctx, network, address, label)
	if err != nil {
		m.unlabel(label)
	}
	return l, err
}

// label returns the keeper's name for a socket about to be opened. A process may listen at an
// address more than once, at port 0 for example. Each socket then has a number, and the
// replacement's second socket continues with the second one.
func (m *Member) label(network, address string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	label := network + " " + address
	for n := 2; m.labels[label]; n++ {
		label = fmt.Sprintf("%s %s #%d", network, address, n)
	}
	m.labels[label] = true
	return label
}

// unlabel frees the label of a closed socket.
func (m *Member) unlabel(label string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.labels, label)
}

func (m *Member) listen(ctx context.Context, network, address, label string) (*Listener, error) {
	l := &Listener{m: m, label: label, conns: make(chan *Session), stopped: make(chan struct{}), notify: make(chan struct{}, 1)}
	f, err := m.find(wire.Listener, label)
	if err != nil {
		return nil, err
	}
	var n net.Listener
	if f != nil {
		n, err = net.FileListener(f)
		f.Close()
	} else {
		n, err = m.o.Listen.Listen(ctx, network, address)
	}
	if errors.Is(err, unix.EADDRINUSE) {
		err = fmt.Errorf("%w: if member %s of %s previously used another address, release that first (weir handoff forget --listeners)", err, m.o.Name, m.o.Service)
	}
	if err != nil {
		return nil, err
	}
	t, ok := n.(*net.TCPListener)
	if !ok {
		n.Close()
		return nil, fmt.Errorf("listen %s: the keeper's socket of this name is not a TCP listener", label)
	}
	l.tcp = t
	if l.id, err = inline(t); err == nil && f == nil {
		err = l.keep()
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	m.mu.Lock()
	m.listeners = append(m.listeners, l)
	if m.proving != nil {
		l.pause(true)
	}
	m.mu.Unlock()
	l.accepts(t)
	return l, nil
}

// find asks the keeper for a socket of an earlier member of this name. It returns nil if there is
// none.
func (m *Member) find(k wire.Kind, label string) (*os.File, error) {
	r, err := m.call(&wire.Message{Type: wire.Find, Number: uint32(k), Text: label}, nil)
	if errors.Is(err, wire.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if r.m.Cut {
		err := wire.ErrNoDescriptors()
		m.post(&wire.Message{Type: wire.Reject, Session: r.m.Session, Number: uint32(wire.Lost), Text: err.Error()})
		return nil, err
	}
	if len(r.fds) == 0 {
		return nil, fmt.Errorf("%w: an answer without the socket", wire.ErrMalformed)
	}
	wire.CloseAll(r.fds[1:])
	m.post(&wire.Message{Type: wire.Accept, Session: r.m.Session})
	return os.NewFile(uintptr(r.fds[0]), label), nil
}

// socketCookie returns the kernel's identifier of a socket.
func socketCookie(c interface {
	SyscallConn() (rawConn, error)
}) (uint64, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var id uint64
	if cerr := raw.Control(func(fd uintptr) { id, err = sock.Cookie(int(fd)) }); cerr != nil {
		return 0, cerr
	}
	return id, err
}

// inline makes urgent bytes part of the stream, for all connections of a listener before they are
// accepted. It returns the listener's cookie.
func inline(t *net.TCPListener) (uint64, error) {
	raw, err := t.SyscallConn()
	if err != nil {
		return 0, err
	}
	var id uint64
	cerr := raw.Control(func(fd uintptr) {
		sock.Inline(int(fd))
		id, err = sock.Cookie(int(fd))
	})
	return id, errors.Join(cerr, err)
}

// keepSocket gives the keeper a listener or a packet socket.
func (m *Member) keepSocket(k wire.Kind, id uint64, label string, raw rawConn) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = m.post(&wire.Message{Type: wire.Keep, Session: id, Number: uint32(k), Text: label}, int(fd))
	})
	return errors.Join(cerr, err)
}

func (l *Listener) keep() error {
	raw, err := l.tcp.SyscallConn()
	if err != nil {
		return err
	}
	return l.m.keepSocket(wire.Listener, l.id, l.label, raw)
}

// accepts starts an accept loop for a socket, unless the listener is stopped.
func (l *Listener) accepts(t *net.TCPListener) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	l.sockets = append(l.sockets, t)
	if l.resumed != nil {
		t.SetDeadline(past)
	}
	l.running.Go(func() { l.run(t) })
	return true
}

// pause stops or resumes accepting. The socket stays open.
func (l *Listener) pause(yes bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if yes == (l.resumed != nil) {
		return
	}
	by := time.Time{}
	if yes {
		by, l.resumed = past, make(chan struct{})
	} else {
		close(l.resumed)
		l.resumed = nil
	}
	for _, t := range l.sockets {
		t.SetDeadline(by)
	}
}

// waitResumed waits until a paused listener resumes or stops.
func (l *Listener) waitResumed() {
	l.mu.Lock()
	resumed := l.resumed
	l.mu.Unlock()
	if resumed == nil {
		return
	}
	select {
	case <-resumed:
	case <-l.stopped:
	}
}

// run accepts connections, one ahead of the application.
func (l *Listener) run(t *net.TCPListener) {
	wait := accept.Backoff{Name: t.Addr().String(), Log: l.m.o.Log}
	for {
		c, err := t.AcceptTCP()
		if err == nil {
			wait.Accepted()
			l.addSession(c)
			continue
		}
		if l.isStopped() || errors.Is(err, net.ErrClosed) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			l.waitResumed()
			continue
		}
		if !temporary(err) {
			l.stop(err)
			return
		}
		wait.Failed(err)
	}
}

// temporary reports whether an accept error concerns one connection or passes. Only errors of a
// closed or stopped socket are permanent.
func temporary(err error) bool {
	return !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EBADF) && !errors.Is(err, unix.ENOTSOCK)
}

// addSession creates a session of a new connection.
func (l *Listener) addSession(c *net.TCPConn) {
	s, err := l.m.newSession(c, l.label)
	if err != nil {
		l.m.o.Log.Warn("connection closed, cannot be kept", "remote", c.RemoteAddr(), "err", err)
		c.Close()
		return
	}
	s.lock()
	l.m.mu.Lock()
	l.m.sessions[s.id] = s
	l.m.mu.Unlock()
	s.keepAgain()
	select {
	case l.conns <- s:
	case <-l.stopped:
		// Accepted, but the application no longer asks. The next caller or the next process gets
		// it.
		l.deliver(s)
	}
}

// deliver queues a session for Accept.
func (l *Listener) deliver(s *Session) {
	l.mu.Lock()
	l.received = append(l.received, s)
	l.mu.Unlock()
	select {
	case l.notify <- struct{}{}:
	default:
	}
}

// next returns a received session still owned by this process.
func (l *Listener) next() *Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.received) > 0 {
		s := l.received[0]
		l.received = l.received[1:]
		if s.ours() {
			return s
		}
	}
	return nil
}

// AcceptSession waits for a session: a new connection, or one of another member. It returns
// ErrReplaced when a newer process has proved itself and has all sessions not ended here. It
// returns net.ErrClosed after Close.
func (l *Listener) AcceptSession() (*Session, error) {
	for {
		if s := l.next(); s != nil {
			return s, nil
		}
		select {
		case s := <-l.conns:
			if s.ours() { // no newer process has it
				return s, nil
			}
		case <-l.notify:
		case <-l.stopped:
			l.running.Wait()
			l.m.handedOver()
			if s := l.next(); s != nil {
				return s, nil
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			return nil, l.err
		}
	}
}

// Addr returns the local address.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Member returns this process as a member of the service.
func (l *Listener) Member() *Member { return l.m }

// Transfer calls Member.Transfer.
func (l *Listener) Transfer(s *Session, to string, state []byte) error {
	return l.m.Transfer(s, to, state)
}

// Replaced calls Member.Replaced.
func (l *Listener) Replaced() <-chan struct{} { return l.m.Replaced() }

func (l *Listener) isStopped() bool {
	select {
	case <-l.stopped:
		return true
	default:
		return false
	}
}

// stop stops accepting. The keeper still has the socket.
func (l *Listener) stop(err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	l.err = err
	close(l.stopped)
	l.tcp.Close()
	return true
}

// Close stops listening for good: waiting connections are refused. A listener of the function
// Listen also leaves the service, see Member.Close. Then socket and sessions stay with the keeper
// for the next process. Connections to the address hang until it starts, or until the keeper's hold
// time ends. Without a next process, call Forget.
func (l *Listener) Close() error {
	if l.own { // see Forget
		l.stop(net.ErrClosed)
		return l.m.Close()
	}
	if !l.stop(net.ErrClosed) {
		return net.ErrClosed
	}
	l.m.mu.Lock()
	for i, o := range l.m.listeners {
		if o == l {
			l.m.listeners = append(l.m.listeners[:i:i], l.m.listeners[i+1:]...)
			break
		}
	}
	l.m.mu.Unlock()
	defer l.m.unlabel(l.label) // after the keeper has released it
	return l.m.post(&wire.Message{Type: wire.Drop, Session: l.id})
}

// Forget stops listening for good and leaves the service: see [Member.Forget].
func (l *Listener) Forget() error {
	l.stop(net.ErrClosed)
	return l.m.Forget()
}

// listenerFor returns the listener for a session of a label: the one with this label, else the
// first accepting one.
func (m *Member) listenerFor(label string) *Listener {
	m.mu.Lock()
	defer m.mu.Unlock()
	var first *Listener
	for _, l := range m.listeners {
		if l.isStopped() {
			continue
		}
		if l.label == label {
			return l
		}
		if first == nil {
			first = l
		}
	}
	return first
}

// has reports whether a socket offered by the keeper is already here.
func (m *Member) has(msg *wire.Message) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.listeners {
		if l.id == msg.Session && !l.isStopped() {
			return true
		}
	}
	for _, p := range m.packets {
		if p.id == msg.Session {
			return true
		}
	}
	return false
}

// adoptListener continues with a dead member's listener. Our first listener then also returns its
// connections.
func (m *Member) adoptListener(msg *wire.Message, fd int) error {
	if m.has(msg) {
		return nil
	}
	l := m.listenerFor(msg.Text)
	if l == nil || !m.o.Orphans {
		return wire.Errorf(wire.NotFound, "no listener for %q here", msg.Text)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(dup), msg.Text)
	n, err := net.FileListener(f)
	f.Close()
	if err != nil {
		return err
	}
	t, ok := n.(*net.TCPListener)
	if !ok {
		n.Close()
		return errors.New("not a TCP listener")
	}
	if !l.accepts(t) {
		t.Close()
		return wire.Errorf(wire.NotFound, "no listener for %q here any more", msg.Text)
	}
	go func() { <-l.stopped; t.Close() }()
	return nil
}
