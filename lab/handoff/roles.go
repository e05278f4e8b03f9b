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
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/awake"
	"github.com/weir-project/weir/kernel"
)

// Processes of the experiments are the lab's own binary, in a role. What they are told comes as JSON in an argument and in
// lines on standard input; with its end they end, too.
const roleArg = "__handoff"

var roles = map[string]func(arg string) error{"member": playMember, "agent": playAgent, "lb": playLB, "workers": playWorkers}

// Play plays a role, if this process is one of an experiment's. main calls it first; else it returns.
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

// say tells the lab a line.
var say = func() func(format string, a ...any) {
	var mu sync.Mutex
	return func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", a...)
	}
}()

// hear calls f with each line that the lab says, as words.
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

// certificates are files of an agent.
type certificates struct{ Cert, Key, CA string }

// memberRole is a process that serves sessions.
type memberRole struct {
	Keeper string
	Name   string
	Listen netip.AddrPort
	Buffer int // bytes of a socket's buffers, as set; 0: the kernel's
	Orphan bool
}

// playMember says "has REMOTE" of each session that it gets. It is told "move REMOTE TO", and says "stays REMOTE REASON" where
// that cannot be.
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
	awake.Room() // four servers share this machine's CPUs: what they do for themselves is time of the moves
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
		go func() { // before anybody is told of it: the client waits
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
		return fmt.Errorf("told %q", words)
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

// talk answers each byte with one that depends on its place in the stream: none can be lost, doubled or changed, in either
// direction, without the client's seeing it. The state is the place.
func talk(s *handoff.Session) error {
	var at uint64
	if b := s.State(); len(b) == 8 {
		at = binary.BigEndian.Uint64(b)
	}
	b := make([]byte, 64<<10)
	for {
		n, err := s.Read(b)
		awake.Busy()
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

// agentRole is a server's agent.
type agentRole struct {
	Certificates certificates
	Options      backend.Options // without what JSON cannot carry
	Root         string
	Listen       string
}

// playAgent answers "status" with a line of JSON. "kill PID … at STEP" has it kill these and itself at the next such step.
func playAgent(arg string) error {
	var o agentRole
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	config, err := peer.Files{Certificate: o.Certificates.Cert, Key: o.Certificates.Key, CA: o.Certificates.CA}.Load()
	if err != nil {
		return err
	}
	o.Options.TLS, o.Options.Root, o.Options.Log = config, kernel.OpenRoot(o.Root), slog.New(slog.NewTextHandler(os.Stderr, nil))
	var d death
	o.Options.Step = d.at
	a, err := backend.New(context.Background(), o.Options)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, l) }()
	say("ready")
	err = hear(func(words []string) error {
		if words[0] == "kill" {
			return d.plan(words[1:])
		}
		s, err := a.Status()
		if err != nil {
			return err
		}
		b, err := json.Marshal(agentStatus{s, s.Transfer.All, s.Stopped.All})
		say("%s", b)
		return err
	})
	cancel()
	return errors.Join(err, <-ended)
}

// agentStatus is what an agent has done, with the times of its latest moves.
type agentStatus struct {
	backend.Status
	Transfers, Stops []time.Duration
}

// death is a step at which this process is killed, and others with it. The lab is told first.
type death struct {
	mu   sync.Mutex
	step string
	with []int
}

// plan takes "PID … at STEP".
func (d *death) plan(words []string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.with = nil
	for i, w := range words {
		if w == "at" {
			d.step = strings.Join(words[i+1:], " ")
			say("dead at %s", d.step)
			return nil
		}
		pid, err := strconv.Atoi(w)
		if err != nil {
			return err
		}
		d.with = append(d.with, pid)
	}
	return fmt.Errorf("told to die at no step: %q", words)
}

func (d *death) at(step string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if step != d.step {
		return
	}
	say("dies")
	for _, pid := range d.with {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {} // it is a moment until the signal comes
}

// lbRole is a load balancer.
type lbRole struct {
	Certificates         certificates
	Devices              []string
	Service              lb.Service
	Backends             []lb.Backend
	Listen               string
	BufferTimeout, Lapse time.Duration
	Root                 string
}

// playLB answers "status" with the counts of the data path and "flows" with the flows, a line of JSON each. "learn CLIENT HOST"
// has a client's flow go to a host.
func playLB(arg string) error {
	var o lbRole
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	config, err := peer.Files{Certificate: o.Certificates.Cert, Key: o.Certificates.Key, CA: o.Certificates.CA}.Load()
	if err != nil {
		return err
	}
	f, err := lb.Open(context.Background(), kernel.OpenRoot(o.Root), "lb", lb.Options{Devices: o.Devices})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := errors.Join(f.SetService(o.Service), f.SetBackends(o.Backends)); err != nil {
		return err
	}
	var d death
	a, err := lb.NewAgent(f, lb.AgentOptions{Name: "lb", TLS: config, Backends: o.Backends, EndedTimeout: 200 * time.Millisecond, BufferTimeout: o.BufferTimeout, MoveTimeout: o.Lapse, Step: d.at,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Serve(ctx, l) }()
	say("ready")
	err = hear(func(words []string) error {
		var v any
		var err error
		switch words[0] {
		case "kill":
			return d.plan(words[1:])
		case "flows":
			v, err = flowsOf(f)
		case "learn": // CLIENT HOST
			var client netip.AddrPort
			var host int
			if client, err = netip.ParseAddrPort(words[1]); err == nil {
				host, err = strconv.Atoi(words[2])
			}
			if err == nil {
				err = f.Learn(lb.Key{Client: client, Service: o.Service.ID}, move.Backend(host), 0)
			}
		default:
			v, err = f.Counts()
		}
		if err != nil {
			return err
		}
		b, err := json.Marshal(v)
		say("%s", b)
		return err
	})
	cancel()
	return errors.Join(err, <-ended)
}

// flow is one of the load balancer's.
type flow struct {
	Client    netip.AddrPort
	Owner     uint16
	Buffering bool
	Moving    bool
}

func flowsOf(f *lb.DataPath) (out []flow, err error) {
	err = f.Flows(func(k lb.Key, fl lb.Flow) bool {
		out = append(out, flow{k.Client, uint16(fl.Owner), fl.Buffering || fl.Buffered, fl.To != 0})
		return true
	})
	return out, err
}
