// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// Ready is a command that checks whether a member can serve, because a bound socket is not yet a ready server. It runs
// before the member is admitted, and never afterwards.
type Ready struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Command        []string      `yaml:"command" json:"command"`             // program and arguments; no shell
	Interval       time.Duration `yaml:"interval" json:"interval,omitempty"` // time between two runs, ns; 0: DefaultReadyInterval
	Timeout        time.Duration `yaml:"timeout" json:"timeout,omitempty"`   // limit of one run, ns; 0: DefaultReadyTimeout
}

// Defaults of a check, and the maximum timeout of a run.
const (
	DefaultReadyInterval = 200 * time.Millisecond
	DefaultReadyTimeout  = 5 * time.Second
	maxReadyTimeout      = 10 * time.Minute
)

func (r *Ready) validate() error {
	switch {
	case len(r.Command) == 0 || r.Command[0] == "":
		return errors.New("ready: no command: give one, like ready: {command: [/usr/bin/dig, +short, \"@127.0.0.1\", example.org]}")
	case r.Interval < 0 || r.Interval > 0 && r.Interval < 10*time.Millisecond:
		return fmt.Errorf("ready: interval %s: want at least 10ms", r.Interval)
	case r.Timeout < 0 || r.Timeout > maxReadyTimeout:
		return fmt.Errorf("ready: timeout %s: want at most %s", r.Timeout, maxReadyTimeout)
	}
	return nil
}

// Every returns the time between two runs.
func (r *Ready) Every() time.Duration {
	if r.Interval > 0 {
		return r.Interval
	}
	return DefaultReadyInterval
}

// Limit returns the time limit of one run.
func (r *Ready) Limit() time.Duration {
	if r.Timeout > 0 {
		return r.Timeout
	}
	return DefaultReadyTimeout
}

// Asked describes the checked member, for the check's environment.
type Asked struct {
	Service string
	Slot    int
	PID     int    // process with the sockets
	Start   uint64 // its start time in clock ticks since boot; 0: not compared
	Netns   string // as weir status shows it
}

// Check runs the command once, in network namespace ns, as the user of process a.PID, with a clean environment. It
// returns nil if the command exits with status 0 in time. Otherwise the error wraps ErrNotReady and ends with the
// command's last output. All processes started by the command end with it, daemons included (see family).
func (r *Ready) Check(ctx context.Context, ns *netns.Handle, a Asked) error {
	ctx, cancel := context.WithTimeout(ctx, r.Limit())
	defer cancel()
	var out tail
	id, err := users.OfProcess(a.PID)
	if start, e := pidfd.StartTime(a.PID); err == nil && a.Start != 0 && (e != nil || start != a.Start) {
		err = fmt.Errorf("process %d: %w", a.PID, pidfd.ErrGone) // another process has its number, perhaps of another user
	}
	if err != nil {
		return fmt.Errorf("%w: the user of its process is unknown: %w", ErrNotReady, err)
	}
	who := fmt.Sprintf("the checks that run as user %d", id.Credential.Uid)
	if err := bounded.Run(who, func() error { return nil }); err != nil { // earlier checks still run
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	path, err := id.Program(r.Command[0])
	if err != nil {
		return fmt.Errorf("%w: cannot start its check: %w", ErrNotReady, err)
	}
	c := exec.Command(path, r.Command[1:]...)
	c.Args[0] = r.Command[0]
	c.Dir = "/"
	c.Env = append(id.Environ(), "WEIR_SERVICE="+a.Service, "WEIR_SLOT="+strconv.Itoa(a.Slot),
		"WEIR_PID="+strconv.Itoa(a.PID), "WEIR_NETNS="+a.Netns)
	c.Stdout, c.Stderr = &out, &out
	// The process group ends all children at once, and the family ends children outside the group. Without it they could
	// keep the output open.
	c.SysProcAttr = id.SysProcAttr()
	c.WaitDelay = 100 * time.Millisecond
	// The child inherits the namespace, no_new_privs and the bounding set of the forking thread.
	var all family
	if err := ns.Do(func() error {
		all = newFamily()
		if err := id.Confine(); err != nil {
			return users.Lacking(err, unix.CAP_SETPCAP)
		}
		return users.Lacking(users.Lacking(c.Start(), unix.CAP_SETGID), unix.CAP_SETUID)
	}); err != nil {
		all.end()
		return fmt.Errorf("%w: cannot start its check: %w", ErrNotReady, err)
	}
	late, exited := awaitGroup(ctx, c.Process.Pid)
	all.end()
	err = bounded.Run(who, func() error { <-exited; return c.Wait() })
	switch {
	case errors.Is(err, bounded.ErrStuck) && int(id.Credential.Uid) != os.Geteuid() && !users.Has(unix.CAP_KILL):
		return fmt.Errorf("%w: cannot end %s: %w", ErrNotReady, r.Command[0], users.Lacking(unix.EPERM, unix.CAP_KILL))
	case errors.Is(err, bounded.ErrStuck): // it may still write
		return fmt.Errorf("%w: SIGKILL does not end %s, because it waits for a file system: %w", ErrNotReady, r.Command[0], err)
	case late && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w: %s did not end within %s%s", ErrNotReady, r.Command[0], r.Limit(), out.said())
	case late:
		return ctx.Err()
	case c.ProcessState.Success(): // also if its output stayed open
		return nil
	}
	return fmt.Errorf("%w: %s: %w%s", ErrNotReady, r.Command[0], err, out.said())
}

// awaitGroup waits for the leader of a process group, and kills the whole group when the leader exits or ctx is done.
// late reports the latter. The leader is not reaped meanwhile, so its number cannot be reused. exited may close later
// than the return: no signal ends a wait for a file system (FUSE).
func awaitGroup(ctx context.Context, pid int) (late bool, exited <-chan struct{}) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for errors.Is(unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
		}
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		late = true
	}
	unix.Kill(-pid, unix.SIGKILL)
	return late, ended
}

// tail keeps the last bytes written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	const most = 512
	t.b = append(t.b, p...)
	if over := len(t.b) - most; over > 0 {
		t.b = t.b[over:]
	}
	return len(p), nil
}

// said returns the last line, for the end of an error.
func (t *tail) said() string {
	b := bytes.TrimSpace(t.b)
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
		b = b[i+1:]
	}
	if len(b) == 0 {
		return ""
	}
	return ": " + strings.ToValidUTF8(string(b), "�")
}
