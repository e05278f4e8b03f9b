// SPDX-License-Identifier: Apache-2.0

// Package guard limits floods of UDP at a program's own sockets, without a rule: clients that were there before a flood keep
// being served. [Attach] puts a socket under a limit. It loads the program itself, as root or with CAP_BPF and CAP_NET_ADMIN,
// or takes the guard that `weir guard grant` gave the process. feature/guard/README.md has the algorithm.
package guard

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/internal/sockfilter"
)

// GrantEnv names the environment variable by which a process is told of a guard that it was given: the numbers of two
// descriptors, the program's and the state's, as in "3,4". It is how an application without any right gets one.
const GrantEnv = "WEIR_GUARD_FDS"

type (
	// Limit is a rate of packets per second; 0 is no limit.
	Limit = guardstate.Limit
	// Limits are what a guard enforces; they change while it runs.
	Limits = guardstate.Limits
	// Counts is what a guard has seen and whom it knows.
	Counts = guardstate.Counts
	// Tier is what became of the packets of one tier.
	Tier = guardstate.Tier
	// Pattern is what many refused packets have in common.
	Pattern = guardstate.Pattern
)

// MaxLimit is the highest limit.
const MaxLimit = guardstate.MaxLimit

// ParseLimit reads "20kpps", "1.5Mpps", "500pps", "500/s" or "500".
func ParseLimit(text string) (Limit, error) { return guardstate.ParseLimit(text) }

// ErrOccupied says that the socket has a filter of its own already.
var ErrOccupied = sockfilter.ErrOccupied

// ErrUnsupported says that this kernel has no guard, or none for this kind of socket.
var ErrUnsupported = sockfilter.ErrUnsupported

// ErrNoGrant says that the process may not load a guard, and was not given one.
var ErrNoGrant = errors.New("no right to load a guard, and none was given")

// ErrAboveGrant says that a process asked for a higher limit than it was granted.
var ErrAboveGrant = errors.New("more than was granted")

// ErrClosed says that a guard was used after Close; it wraps [net.ErrClosed].
var ErrClosed = fmt.Errorf("the guard is closed: %w", net.ErrClosed)

// Guard limits what sockets of this process get. Its methods may be called by several goroutines at once.
type Guard struct {
	mu      sync.Mutex // of all of it
	program int        // descriptors, ours
	stateFD int
	state   *guardstate.State // nil: closed
	last    Counts            // when it was closed
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
// filter of its own keeps it, and the error wraps [ErrOccupied]. Close the guard when the socket needs it no
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
		f := sockfilter.Filter{FD: int(fd), Name: name(conn)}
		inner = f.Attach(g.program)
	})
	return errors.Join(err, inner)
}

func name(conn syscall.Conn) string {
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
	g.state.SetLimits(l)
	return nil
}

// Counts is what the guard has seen and whom it knows; after Close what it was then.
func (g *Guard) Counts() Counts {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return g.last
	}
	return g.state.Read(monotonic())
}

// Close lets go of the guard. Sockets that it was attached to keep its program until they close. Closing it again does
// nothing.
func (g *Guard) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return
	}
	g.last = g.state.Read(monotonic())
	g.state.Close()
	g.state = nil
	unix.Close(g.program)
	unix.Close(g.stateFD)
}

// loaded makes a guard of a program of its own.
func loaded(limit Limit) (*Guard, error) {
	program, state, err := load(Limits{Total: limit})
	if err != nil {
		return nil, err
	}
	defer unix.Close(program)
	defer unix.Close(state)
	return adopt(program, state)
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
	g, err := adopt(program, state)
	if err != nil {
		return nil, fmt.Errorf("%s=%q: %w", GrantEnv, text, err)
	}
	return g, nil
}

// adopt makes a guard of duplicates of two descriptors, asking the kernel nothing that takes a right.
func adopt(program, state int) (_ *Guard, err error) {
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
	if g.state, err = guardstate.Map(g.stateFD); err != nil {
		return nil, err
	}
	if version := g.state.Total.Version; version != guardstate.ABI {
		g.state.Close()
		return nil, fmt.Errorf("version %d: %w, which knows %d: build it with the same weir", version, guardstate.ErrLayout, guardstate.ABI)
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
	g.state.Close()
	return &Grant{os.NewFile(uintptr(g.program), "guard program"), os.NewFile(uintptr(g.stateFD), "guard state")}, nil
}

// Files are the descriptors to give.
func (g *Grant) Files() []*os.File { return []*os.File{g.Program, g.State} }

// Env is the entry of the environment that tells a process of the grant, whose first descriptor has a number there.
func (g *Grant) Env(first int) string { return fmt.Sprintf("%s=%d,%d", GrantEnv, first, first+1) }

// Close lets go of it here.
func (g *Grant) Close() error { return errors.Join(g.Program.Close(), g.State.Close()) }

// monotonic is the time of the guard's clock, in ns.
func monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0 // cannot fail for this clock
	}
	return uint64(t.Nano())
}
