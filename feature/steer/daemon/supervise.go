// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// errSlotInUse means that a running process has the slot.
var errSlotInUse = errors.New("slot in use")

// Supervision runs a daemon as the member of a slot, on hosts without systemd.
//
// The slot depends on the daemon and its sockets, never on this process. If this process is killed, the daemon keeps
// its traffic until it exits.
type Supervision struct {
	Slot    slots.Slot
	Command []string // the daemon, in the foreground
	// User is the daemon's user, with a clean environment and no way to gain privileges. Empty means the user and
	// environment of this process.
	User  string
	Env   []string         // NAME=VALUE, added to the environment
	Bound []service.Listen // addresses of its sockets, one per listen; default: as configured
	// Give makes weir open the service's sockets and pass them like systemd (LISTEN_FDS). With Restart they stay open
	// between two runs of the daemon, and the slot stays admitted: traffic waits in their queues.
	Give     bool
	Restart  bool // start the daemon again when it exits, until a signal ends it
	TakeOver bool // take the slot from a running process
	// Replace takes the slot over and ends its process after the drain ([Retirement]). The service must have
	// generations.
	Replace bool
	Stop    syscall.Signal // ends the replaced process; 0: the graceful signal of its program

	Running func(bool) // called after the start and the end of each run, if not nil
	Log     feature.Logger
	Signals <-chan os.Signal // forwarded; SIGTERM, SIGINT and SIGQUIT also end Restart
	// Launch returns a command that sets LISTEN_PID to its own PID and then executes argv. Only Give needs it.
	Launch func(argv []string) *exec.Cmd
}

// Pauses between two runs of the daemon. The pause doubles each time. After a run longer than lastPause it starts again
// with firstPause.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 10 * time.Second
)

// supervisor is a running Supervision.
type supervisor struct {
	Supervision
	root   *kernel.Root
	member service.Member
	ns     *netns.Handle
	as     *users.Identity // of User; nil: identity of this process
	env    []string
	given  *given
	pid    int  // of the daemon's last run
	ended  bool // by a signal

	began       uint64     // CLOCK_BOOTTIME, ns
	generations bool       // of the service
	replaces    bool       // takes the slot from a living process
	announced   bool       // as the latest one
	stale       chan error // why the daemon gives the slot up
}

// Run runs the daemon until it exits, repeatedly with Restart. It returns the exit status, or 128 plus the signal's
// number if a signal killed the daemon. An error means that the daemon did not run, or gave
// the slot up for a later one.
func (v Supervision) Run(ctx context.Context, r *kernel.Root) (status int, err error) {
	s := &supervisor{Supervision: v, root: r, began: kernel.Boottime(), stale: make(chan error, 1)}
	if s.Running == nil {
		s.Running = func(bool) {}
	}
	if err := s.prepare(); err != nil {
		return 0, err
	}
	defer s.ns.Close()
	if s.given != nil {
		defer s.given.Close()
	}
	defer s.forgetLatest()
	defer s.release()
	pause := firstPause
	for {
		began := time.Now()
		status, err = s.once(ctx)
		if err != nil || !s.Restart || s.ended {
			return status, err
		}
		if !s.member.Keep {
			s.release()
		}
		if time.Since(began) > lastPause {
			pause = firstPause
		}
		s.Log.Warn("daemon exited, restarting it", "status", status, "pause", pause)
		if s.rest(pause); s.ended {
			return status, nil
		}
		pause = min(2*pause, lastPause)
	}
}

// prepare finds the slot and the user, and opens the sockets for Give.
func (s *supervisor) prepare() (err error) {
	p, err := record.Read(s.root, record.Instance(s.Slot.Scope, s.Slot.Service))
	if err != nil {
		return fmt.Errorf("service %s: %w", s.Slot.Service, err)
	}
	if s.member, err = supervisedMember(p, s.Slot, s.Bound); err != nil {
		return err
	}
	s.member.Keep = s.Give && s.Restart
	s.generations = p.Service.Generations != nil
	s.replaces = s.generations && (s.Replace || s.TakeOver)
	if s.Replace && !s.generations {
		return fmt.Errorf("service %s has no generations, so its slots cannot have two members: add generations: {} to its steer section and apply", s.Slot.Service)
	}
	if pid := s.occupant(); pid != 0 && !s.TakeOver && !s.Replace {
		return fmt.Errorf("%w: process %d serves slot %d of %s: end it first, take over with --take-over, or, with generations, replace it with --replace", errSlotInUse, pid, s.Slot.Slot, s.Slot.Service)
	}
	s.env = append(os.Environ(), s.Env...)
	uid := os.Geteuid()
	if s.User != "" {
		if uid, err = s.become(s.User); err != nil {
			return err
		}
	}
	if s.ns, err = s.Slot.OpenNetns(p); err != nil || !s.Give {
		return err
	}
	listens := s.member.Bound
	if len(listens) == 0 {
		listens = p.Service.Listen
	}
	if s.given, err = openGiven(s.ns, listens, *p.Service.Backlog, uid); err != nil {
		s.ns.Close()
		return err
	}
	s.env = append(slices.DeleteFunc(s.env, func(v string) bool { return strings.HasPrefix(v, "LISTEN_") }), s.given.environ()...)
	return nil
}

// supervisedMember returns the slot's member without its process. The configured sockets and check apply to the
// supervised daemon.
func supervisedMember(p *record.Service, s slots.Slot, bound []service.Listen) (service.Member, error) {
	m := service.Member{Slot: s.Slot}
	if _, err := engine.MemberFor(p, s, &m); err != nil {
		return m, err
	}
	if c := p.Service.Member(s.Slot); c != nil {
		m.Bound, m.Ready = c.Bound, c.Ready
	}
	if len(bound) > 0 {
		m.Bound = bound
	}
	return m, nil
}

// occupant returns the running process in the slot, or 0.
func (s *supervisor) occupant() int {
	slots, err := slots.Open(s.root, s.Slot.Scope, s.Slot.Service)
	if err != nil {
		return 0
	}
	defer slots.Close()
	now, err := slots.State(s.Slot.Slot)
	if err != nil || !now.Admitted() || now.PID == 0 || now.Orphaned(&service.Member{Keep: true}) {
		return 0
	}
	return now.PID
}

// start starts the daemon in the service's namespace.
func (s *supervisor) start() (*exec.Cmd, error) {
	c := exec.Command(s.Command[0], s.Command[1:]...)
	if s.given != nil {
		c = s.Launch(s.Command)
		c.ExtraFiles = s.given.files
	}
	c.Env = append(s.env, c.Env...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Own process group: each signal reaches the daemon once, through weir, also signals of a terminal.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start := c.Start
	if s.as != nil {
		c.SysProcAttr = s.as.SysProcAttr()
		start = func() error {
			if err := s.as.Confine(); err != nil {
				return err
			}
			return c.Start()
		}
	}
	if err := s.ns.Do(start); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Command[0], err)
	}
	return c, nil
}

// once runs the daemon until it exits.
func (s *supervisor) once(ctx context.Context) (status int, err error) {
	c, err := s.start()
	if err != nil {
		return 0, err
	}
	s.pid = c.Process.Pid
	s.Running(true)
	exited := make(chan struct{})
	go func() { defer close(exited); c.Wait() }()
	watching, stop := context.WithCancel(ctx)
	settled := make(chan struct{})
	go func() { defer close(settled); s.keepSlot(watching, s.pid) }()
	for running := true; running; {
		select {
		case sig := <-s.Signals:
			c.Process.Signal(sig)
			s.noteEnd(sig)
		case err = <-s.stale:
			s.Log.Warn("daemon not admitted, ending it", "service", s.Slot.Service, "slot", s.Slot.Slot, "err", err)
			c.Process.Signal(cmp.Or(s.Stop, gracefulSignal(s.pid)))
		case <-exited:
			running = false
		}
	}
	s.Running(false)
	stop()
	<-settled
	if err != nil {
		return 0, err
	}
	if ws, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return c.ProcessState.ExitCode(), nil
}

// rest waits before the next run. Meanwhile it handles only signals that end the supervision.
func (s *supervisor) rest(pause time.Duration) {
	for over := time.After(pause); !s.ended; {
		select {
		case sig := <-s.Signals:
			s.noteEnd(sig)
		case <-over:
			return
		}
	}
}

func (s *supervisor) noteEnd(sig os.Signal) {
	if sig == unix.SIGTERM || sig == unix.SIGINT || sig == unix.SIGQUIT {
		s.ended = true
	}
}

// release empties the slot if its process is the daemon or has exited. With the exit hook the slot is empty already.
func (s *supervisor) release() {
	if s.pid == 0 {
		return
	}
	l, err := s.root.Lock(context.Background())
	if err != nil {
		return
	}
	defer l.Unlock()
	e, p, err := engine.OpenSlot(l, s.Slot)
	if err != nil {
		return // the service is gone
	}
	defer e.Close()
	now, err := slots.ProcessIn(e.Pins, p.Row(s.Slot.Slot))
	if err != nil || now.PID == 0 {
		return
	}
	if proc, err := pidfd.Open(now.PID); err == nil {
		defer proc.Close()
		if now.PID != s.pid && proc.Alive() {
			return // another process has the slot
		}
	}
	if err := e.SetState(p.Row(s.Slot.Slot), slots.Exited); err != nil {
		s.Log.Warn("slot not withdrawn", "err", err)
	}
	if back, err := e.FallBack(p, s.Slot.Slot); err != nil {
		s.Log.Warn("slot not returned to the previous generation", "err", err)
	} else if back {
		s.Log.Warn("slot returned to the previous generation", "service", s.Slot.Service, "slot", s.Slot.Slot)
	}
}
