// SPDX-License-Identifier: Apache-2.0

// Package guard limits floods of UDP at a program's own sockets, without rules: the clients known
// before a flood are still served. [Attach] puts a socket under a limit. As root or with CAP_BPF
// and CAP_NET_ADMIN it loads the program itself. Otherwise it uses the guard given to the process
// by `weir guard grant`. feature/guard/README.md describes the algorithm.
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

// GrantEnv is the environment variable with a granted guard: the descriptor numbers of the program
// and of its state, such as "3,4". It gives a guard to an application without privileges.
const GrantEnv = "WEIR_GUARD_FDS"

type (
	// Limit is a rate in packets per second. 0 is no limit.
	Limit = guardstate.Limit
	// Limits are the settings of a guard. They can change at run time.
	Limits = guardstate.Limits
	// Counts is the packets seen by a guard and its known sources.
	Counts = guardstate.Counts
	// Tier is the packet counts of one tier.
	Tier = guardstate.Tier
	// Pattern is a property shared by many refused packets.
	Pattern = guardstate.Pattern
)

// MaxLimit is the highest limit.
const MaxLimit = guardstate.MaxLimit

// ParseLimit parses "20kpps", "1.5Mpps", "500pps", "500/s" or "500".
func ParseLimit(text string) (Limit, error) { return guardstate.ParseLimit(text) }

// ErrOccupied reports a socket with another filter.
var ErrOccupied = sockfilter.ErrOccupied

// ErrUnsupported reports a kernel without guards, or without one for this kind of socket.
var ErrUnsupported = sockfilter.ErrUnsupported

// ErrNoGrant reports a process without the right to load a guard and without a grant.
var ErrNoGrant = errors.New("no right to load a guard, and no grant")

// ErrAboveGrant reports a request above the granted limit.
var ErrAboveGrant = errors.New("above the granted limit")

// ErrClosed reports the use of a closed guard. It wraps [net.ErrClosed].
var ErrClosed = fmt.Errorf("the guard is closed: %w", net.ErrClosed)

// Guard limits the packets received by sockets of this process. It is safe for concurrent use.
type Guard struct {
	mu      sync.Mutex // guards all fields
	program int        // descriptors, owned by the guard
	stateFD int
	state   *guardstate.State // nil: closed
	last    Counts            // at Close
}

// New creates a guard. It uses the granted one (see [GrantEnv]), or loads a program, which needs
// root or CAP_BPF and CAP_NET_ADMIN. The limit is in packets per second over all sockets of the
// guard. A limit above the grant fails with [ErrAboveGrant].
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

// Attach limits one socket, such as a net.UDPConn, to limit packets per second. A socket with a
// filter of its own keeps it, and the error wraps [ErrOccupied]. Close the guard when the socket no
// longer needs it. A closed socket needs nothing.
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

// Attach adds a socket to the guard. After Close it returns [ErrClosed].
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

// SetLimits changes the limit at once, or switches to counting without refusals (Dry). The field
// Each has no effect here. It returns [ErrClosed] after Close. With a grant it returns
// [ErrAboveGrant] for a higher limit, for none, and for Dry. That check is a convention and no
// barrier, because a process can always remove the filter of its own socket.
func (g *Guard) SetLimits(l Limits) error {
	if l.Total > MaxLimit {
		return fmt.Errorf("limit %d: above the highest limit, %s", uint64(l.Total), MaxLimit)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return ErrClosed
	}
	if most := Limit(g.state.Total.Granted); most != 0 && (l.Total == 0 || l.Total > most) {
		return fmt.Errorf("limit %s: %w, %s: request less, or grant more at the start of the process (weir guard grant --limit)", l.Total, ErrAboveGrant, most)
	}
	if l.Dry && g.state.Total.Granted != 0 {
		return fmt.Errorf("dry run: passing everything is %w, %s: leave Dry out, or start the process without a grant and with the right to load a guard", ErrAboveGrant, Limit(g.state.Total.Granted))
	}
	g.state.SetLimits(l)
	return nil
}

// Counts returns the current counts, or the final ones after Close.
func (g *Guard) Counts() Counts {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return g.last
	}
	return g.state.Read(monotonic())
}

// Close releases the guard. Its sockets keep the program until they close. Further calls do
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

// loaded creates a guard with a newly loaded program.
func loaded(limit Limit) (*Guard, error) {
	program, state, err := load(Limits{Total: limit})
	if err != nil {
		return nil, err
	}
	defer unix.Close(program)
	defer unix.Close(state)
	return adopt(program, state)
}

// granted returns the granted guard of the process, nil without a grant.
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

// adopt creates a guard from duplicates of two descriptors. It needs no privileges.
func adopt(program, state int) (_ *Guard, err error) {
	g := &Guard{program: -1, stateFD: -1}
	defer func() {
		if err != nil {
			unix.Close(g.program)
			unix.Close(g.stateFD)
		}
	}()
	if g.program, err = unix.FcntlInt(uintptr(program), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("descriptor %d of the guard's program: %w", program, err)
	}
	if g.stateFD, err = unix.FcntlInt(uintptr(state), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("descriptor %d of the guard's state: %w", state, err)
	}
	if g.state, err = guardstate.Map(g.stateFD); err != nil {
		return nil, err
	}
	if version := g.state.Total.Version; version != guardstate.ABI {
		g.state.Close()
		return nil, fmt.Errorf("version %d: %w, want %d: build it with the same weir", version, guardstate.ErrLayout, guardstate.ABI)
	}
	return g, nil
}

// Grant is a guard for another process. Pass Files as descriptors in this order. Env, called with
// the number of the first, is the environment entry for them.
type Grant struct{ Program, State *os.File }

// NewGrant creates a guard for an unprivileged process. Pass it as exec.Cmd's ExtraFiles or by
// SCM_RIGHTS. [Attach] there finds it through the environment and accepts no higher limit.
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

// Files returns the descriptors to pass.
func (g *Grant) Files() []*os.File { return []*os.File{g.Program, g.State} }

// Env returns the environment entry of the grant. first is the number of the first descriptor in
// the other process.
func (g *Grant) Env(first int) string { return fmt.Sprintf("%s=%d,%d", GrantEnv, first, first+1) }

// Close closes the descriptors in this process.
func (g *Grant) Close() error { return errors.Join(g.Program.Close(), g.State.Close()) }

// monotonic returns the time of the guard's clock, in ns.
func monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0 // never fails for this clock
	}
	return uint64(t.Nano())
}
