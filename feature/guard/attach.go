// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	gosync "sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// GrantEnv names the environment variable by which a process is told of a guard that it was given: the numbers of two
// descriptors, the program's and the state's, as in "3,4". It is how an application without any right gets one.
const GrantEnv = "WEIR_GUARD_FDS"

// ErrNoGrant says that the process may not load a guard, and was not given one.
var ErrNoGrant = errors.New("no right to load a guard, and none was given")

// ErrAboveGrant says that a process asked for a higher limit than it was granted.
var ErrAboveGrant = errors.New("more than was granted")

// ErrClosed says that a guard was used after Close; it wraps [net.ErrClosed].
var ErrClosed = fmt.Errorf("the guard is closed: %w", net.ErrClosed)

// Guard limits what sockets of this process get. Its methods may be called by several goroutines at once.
type Guard struct {
	mu      gosync.Mutex // of all of it
	program int          // descriptors, ours
	stateFD int
	state   *state // nil: closed
	last    Counts // when it was closed
}

// New makes a guard: of what the process was given (see [GrantEnv]) or, with the right to (root, or CAP_BPF and
// CAP_NET_ADMIN), of a program that it loads. The limit is of packets per second, of all its sockets together. A limit
// above that of the grant is refused with [ErrAboveGrant].
func New(limit Limit) (*Guard, error) {
	if limit == 0 || limit > MaxLimit {
		return nil, fmt.Errorf("limit %d: want packets per second, from 1 to %d", uint64(limit), uint64(MaxLimit))
	}
	g, err := granted()
	if err != nil {
		return nil, err
	}
	if g == nil {
		if g, err = loaded(limit); errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("%w: start it by weir guard grant --limit %s -- COMMAND, or run it as root: %w", ErrNoGrant, limit, err)
		} else if err != nil {
			return nil, err
		}
	}
	if err := g.SetLimits(Limits{Total: limit}); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// Attach limits what one socket gets to so many packets per second. The socket may be a net.UDPConn. One that has a
// filter of its own keeps it, and the error wraps [kernel.ErrOccupied]. Close the guard when the socket needs it no
// more; a socket that closes needs nothing.
func Attach(conn syscall.Conn, limit Limit) (*Guard, error) {
	g, err := New(limit)
	if err != nil {
		return nil, err
	}
	if err := g.Attach(conn); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// Attach puts one more socket under the guard's limit. After Close it returns [ErrClosed].
func (g *Guard) Attach(conn syscall.Conn) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return ErrClosed
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		f := kernel.SocketFilter{FD: int(fd), Name: nameOf(conn)}
		inner = f.AttachFD(g.program)
	})
	return errors.Join(err, inner)
}

func nameOf(conn syscall.Conn) string {
	if c, ok := conn.(interface{ LocalAddr() net.Addr }); ok {
		return c.LocalAddr().String()
	}
	return fmt.Sprintf("%T", conn)
}

// SetLimits changes the limit at once, or has the guard pass everything and only count (Dry). Each is of no use here. It
// returns [ErrClosed] after Close, and [ErrAboveGrant] for a limit above that of the grant, or none, or Dry, where there is
// one: that is the library's word and no barrier, for a process can always take the filter off a socket of its own.
func (g *Guard) SetLimits(l Limits) error {
	if l.Total > MaxLimit {
		return fmt.Errorf("limit %d: more than %s, the highest limit", uint64(l.Total), MaxLimit)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return ErrClosed
	}
	if most := Limit(g.state.Total.Granted); most != 0 && (l.Total == 0 || l.Total > most) {
		return fmt.Errorf("limit %s: %w, %s: ask for less, or have whoever starts the process grant more (weir guard grant --limit)", l.Total, ErrAboveGrant, most)
	}
	if l.Dry && g.state.Total.Granted != 0 {
		return fmt.Errorf("a dry run passes everything: %w, which is %s: leave Dry out, or have whoever starts the process grant nothing and run it with the right to load a guard", ErrAboveGrant, Limit(g.state.Total.Granted))
	}
	g.state.setLimits(l)
	return nil
}

// Counts is what the guard has seen and whom it knows; after Close what it was then.
func (g *Guard) Counts() Counts {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return g.last
	}
	return g.state.read(kernel.Monotonic())
}

// Close lets go of the guard. Sockets that it was attached to keep its program until they close. Closing it again does
// nothing.
func (g *Guard) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return
	}
	g.last = g.state.read(kernel.Monotonic())
	g.state.close()
	g.state = nil
	unix.Close(g.program)
	unix.Close(g.stateFD)
}

// loaded makes a guard of a program of its own.
func loaded(limit Limit) (*Guard, error) {
	c, err := load(constants{}, nil, Socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	m, err := newState(Limits{Total: limit})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	if err := put(c, 0, m, nil); err != nil {
		return nil, err
	}
	return take(c.Programs[Socket.program()].FD(), m.FD())
}

// granted makes a guard of what the process was given; nil if it was given none.
func granted() (*Guard, error) {
	text, ok := os.LookupEnv(GrantEnv)
	if !ok {
		return nil, nil //nolint:nilnil // neither a guard nor an error
	}
	a, b, _ := strings.Cut(text, ",")
	program, err := strconv.Atoi(a)
	state, err2 := strconv.Atoi(b)
	if err != nil || err2 != nil {
		return nil, fmt.Errorf("%s=%q: want the numbers of two descriptors, like 3,4", GrantEnv, text)
	}
	g, err := take(program, state)
	if err != nil {
		return nil, fmt.Errorf("%s=%q: %w", GrantEnv, text, err)
	}
	return g, nil
}

// take makes a guard of duplicates of two descriptors, asking the kernel nothing that takes a right.
func take(program, state int) (_ *Guard, err error) {
	g := &Guard{program: -1, stateFD: -1}
	defer func() {
		if err != nil {
			unix.Close(g.program)
			unix.Close(g.stateFD)
		}
	}()
	if g.program, err = unix.FcntlInt(uintptr(program), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("descriptor %d, of a guard's program: %w", program, err)
	}
	if g.stateFD, err = unix.FcntlInt(uintptr(state), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("descriptor %d, of a guard's state: %w", state, err)
	}
	if g.state, err = mapState(g.stateFD); err != nil {
		return nil, err
	}
	if version := g.state.Total.Version; version != ABI {
		g.state.close()
		return nil, fmt.Errorf("version %d: %w, which knows %d: build it with the same weir", version, ErrLayout, ABI)
	}
	return g, nil
}

// Grant is a guard for another process. Files go to it as descriptors, in this order; Env, given the number of the
// first, is what its environment says of them.
type Grant struct{ Program, State *os.File }

// NewGrant makes a guard that an unprivileged process can be given, as exec.Cmd's ExtraFiles or by SCM_RIGHTS.
// [Attach] there finds it by its environment, and takes no higher limit.
func NewGrant(limit Limit) (*Grant, error) {
	if limit == 0 || limit > MaxLimit {
		return nil, fmt.Errorf("limit %d: want packets per second, from 1 to %d", uint64(limit), uint64(MaxLimit))
	}
	g, err := loaded(limit)
	if err != nil {
		return nil, err
	}
	g.state.Total.Granted = uint32(limit)
	g.state.close()
	return &Grant{os.NewFile(uintptr(g.program), "guard program"), os.NewFile(uintptr(g.stateFD), "guard state")}, nil
}

// Files are the descriptors to give.
func (g *Grant) Files() []*os.File { return []*os.File{g.Program, g.State} }

// Env is the entry of the environment that tells a process of the grant, whose first descriptor has a number there.
func (g *Grant) Env(first int) string { return fmt.Sprintf("%s=%d,%d", GrantEnv, first, first+1) }

// Close lets go of it here.
func (g *Grant) Close() error { return errors.Join(g.Program.Close(), g.State.Close()) }
