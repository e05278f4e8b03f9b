// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/lab/rig"
)

// Processes of the experiments are the lab's own binary, in a role. They receive their configuration as
// JSON in an argument, and commands as lines on standard input. They end with the end of standard input.
const roleArg = "__handoff"

var roles = map[string]func(arg string) error{"member": playMember, "agent": playAgent, "lb": playLB, "workers": playWorkers}

// niceOf is Nice= of a role's unit.
var niceOf = map[string]int{"agent": rig.UnitNice, "lb": rig.UnitNice}

// Play plays a role if this process belongs to an experiment; else it returns. main calls it first.
func Play() {
	if len(os.Args) != 4 || os.Args[1] != roleArg {
		return
	}
	if err := roles[os.Args[2]](os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, os.Args[2]+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// say prints a line to the lab.
var say = func() func(format string, a ...any) {
	var mu sync.Mutex
	return func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", a...)
	}
}()

// hear calls f with each line from the lab, split into words.
func hear(f func(words []string) error) error {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		if err := f(strings.Fields(in.Text())); err != nil {
			return err
		}
	}
	return in.Err()
}

// memberRole is a process with sessions.
type memberRole struct {
	Keeper string
	Name   string
	Listen netip.AddrPort
	Buffer int // bytes of a socket's buffers, as set; 0: the kernel's default
	Orphan bool
}

// playMember prints "has REMOTE" for each session it receives. On "move REMOTE TO" it moves a session. If
// the move fails it prints "stays REMOTE REASON".
func playMember(arg string) error {
	var o memberRole
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	options := handoff.Options{Service: service, Name: o.Name, Keeper: o.Keeper, Orphans: o.Orphan, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	if o.Buffer > 0 {
		options.Listen.Control = func(_, _ string, c syscall.RawConn) error {
			var err error
			cerr := c.Control(func(fd uintptr) { // the kernel doubles them
				err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, o.Buffer/2),
					unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, o.Buffer/2))
			})
			return errors.Join(cerr, err)
		}
	}
	l, err := handoff.Listen(context.Background(), "tcp", o.Listen.String(), options)
	if err != nil {
		return err
	}
	m := &member{of: l.Member(), sessions: map[string]*handoff.Session{}}
	go m.accept(l)
	say("ready")
	return hear(m.told)
}

type member struct {
	of       *handoff.Member
	mu       sync.Mutex
	sessions map[string]*handoff.Session
}

func (m *member) accept(l *handoff.Listener) {
	for {
		s, err := l.AcceptSession()
		if err != nil {
			fmt.Fprintln(os.Stderr, "accept:", err)
			return
		}
		remote := s.RemoteAddr().String()
		m.mu.Lock()
		m.sessions[remote] = s
		m.mu.Unlock()
		go func() { // before the announcement: the client waits
			err := talk(s)
			m.mu.Lock()
			if m.sessions[remote] == s {
				delete(m.sessions, remote)
			}
			m.mu.Unlock()
			if err != nil && !errors.Is(err, handoff.ErrMoved) {
				say("lost %s %v", remote, err)
			}
		}()
		say("has %s", remote)
	}
}

func (m *member) told(words []string) error {
	if len(words) != 3 || words[0] != "move" {
		return fmt.Errorf("unknown command %q", words)
	}
	m.mu.Lock()
	s := m.sessions[words[1]]
	m.mu.Unlock()
	if s == nil {
		say("stays %s it is not here", words[1])
		return nil
	}
	go func() {
		if err := m.of.TransferCommitted(s, words[2]); err != nil {
			say("stays %s %v", words[1], err)
		}
	}()
	return nil
}

// talk answers each byte with a byte derived from its position in the stream. The client therefore detects
// any lost, doubled or changed byte in either direction. The state is the position.
func talk(s *handoff.Session) error {
	var at uint64
	if b := s.State(); len(b) == 8 {
		at = binary.BigEndian.Uint64(b)
	}
	b := make([]byte, 64<<10)
	for {
		n, err := s.Read(b)
		if errors.Is(err, io.EOF) {
			return s.Close()
		}
		if err != nil {
			return err
		}
		scramble(b[:n], at)
		if _, err := s.Write(b[:n]); err != nil {
			return err
		}
		at += uint64(n)
		if err := s.Commit(binary.BigEndian.AppendUint64(nil, at)); err != nil {
			return err
		}
	}
}

func scramble(b []byte, at uint64) {
	for i := range b {
		b[i] ^= byte((at + uint64(i)) * 0x9e3779b97f4a7c15 >> 56)
	}
}
