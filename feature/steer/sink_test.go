// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

const childEnv = "WEIR_STEER_CHILD"

func TestMain(m *testing.M) {
	HolderCommand = func(root, scope string, kind Engine) *exec.Cmd {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), childEnv+"=hold "+root+" "+scope+" "+string(kind))
		return c
	}
	if role := os.Getenv(childEnv); role != "" {
		if err := child(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	nstest.Main(m)
}

// child is what this test binary is when it is started as another program.
func child(role string) error {
	f := strings.Fields(role)
	switch f[0] {
	case "hold":
		return Hold(context.Background(), kernel.OpenRoot(f[1]), f[2], Engine(f[3]))
	case "sink":
		return runSink(f[1:])
	case "change":
		return runChange(f[1:])
	case "upgrade":
		return runUpgrade(f[1:])
	case "recorder":
		return runRecorder(f[1], f[2])
	}
	return fmt.Errorf("no role %q", role)
}

// runSink opens the sockets named, one a line on its standard input or as
// arguments, and answers every datagram and connection with its pid. Lines
// "close N" and "fork" do what they say; it ends with its input.
func runSink(listens []string) error {
	var open []interface{ Close() error }
	start := func(spec string) error {
		proto, addr, _ := strings.Cut(spec, "=")
		s, err := sinkSocket(proto, addr)
		if err != nil {
			return err
		}
		open = append(open, s)
		return nil
	}
	for _, l := range listens {
		if err := start(l); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		verb, arg, _ := strings.Cut(in.Text(), " ")
		var err error
		switch verb {
		case "open":
			err = start(arg)
		case "close":
			var i int
			fmt.Sscan(arg, &i)
			err = open[i].Close()
		case "orphan": // a child that inherits every socket and outlives us
			err = orphan(open)
		}
		if err != nil {
			return err
		}
		fmt.Println("done")
	}
	return nil
}

// orphan starts a sleeping process that holds duplicates of all sockets.
func orphan(open []interface{ Close() error }) error {
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), childEnv+"=sink")
	in, err := c.StdinPipe()
	if err != nil {
		return err
	}
	_ = in
	c.Stdin = nil
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	c.Stdin = r
	c.ExtraFiles = append(c.ExtraFiles, w) // holds its own input open
	for _, s := range open {
		f, err := s.(interface{ File() (*os.File, error) }).File()
		if err != nil {
			return err
		}
		c.ExtraFiles = append(c.ExtraFiles, f)
	}
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return err
	}
	fmt.Println("orphan", c.Process.Pid)
	return nil
}

func sinkSocket(proto, addr string) (interface{ Close() error }, error) {
	reuse := !strings.HasSuffix(proto, "!")
	proto = strings.TrimSuffix(proto, "!")
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if reuse {
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
		})
	}}
	lc.SetMultipathTCP(false)
	me := []byte(fmt.Sprint(os.Getpid()))
	if strings.HasPrefix(proto, "udp") {
		p, err := lc.ListenPacket(context.Background(), proto, addr)
		if err != nil {
			return nil, err
		}
		go func() {
			b := make([]byte, 2048)
			for {
				_, from, err := p.ReadFrom(b)
				if errors.Is(err, net.ErrClosed) {
					return
				} else if err == nil {
					p.WriteTo(me, from)
				}
			}
		}()
		return p.(*net.UDPConn), nil
	}
	l, err := lc.Listen(context.Background(), proto, addr)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write(me)
			c.Close()
		}
	}()
	return l.(*net.TCPListener), nil
}

// sink is a running collector of the tests' own.
type sink struct {
	t   testing.TB
	cmd *exec.Cmd
	in  interface {
		Write([]byte) (int, error)
		Close() error
	}
	out    *bufio.Scanner
	orphan int
}

func startSink(t testing.TB, listens ...string) *sink {
	t.Helper()
	return startSinkAs(t, 0, listens...)
}

// startSinkAs starts it as another user.
func startSinkAs(t testing.TB, uid uint32, listens ...string) *sink {
	t.Helper()
	s := &sink{t: t, cmd: exec.Command("/proc/self/exe")}
	s.cmd.Env = append(os.Environ(), childEnv+"=sink "+strings.Join(listens, " "))
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	// No Pdeathsig: it follows the thread that starts the child, and looking into a namespace
	// uses threads up. The sink ends with its input instead.
	in, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.in, s.out = in, bufio.NewScanner(out)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	s.expect("ready")
	return s
}

func (s *sink) expect(want string) {
	s.t.Helper()
	for s.out.Scan() {
		if n, ok := strings.CutPrefix(s.out.Text(), "orphan "); ok {
			fmt.Sscan(n, &s.orphan)
			s.t.Cleanup(func() { syscall.Kill(s.orphan, syscall.SIGKILL) })
			continue
		}
		if s.out.Text() != want {
			s.t.Fatalf("sink said %q, want %q", s.out.Text(), want)
		}
		return
	}
	s.t.Fatalf("sink ended before it said %q", want)
}

func (s *sink) do(line string) {
	s.t.Helper()
	fmt.Fprintln(s.in, line)
	s.expect("done")
}

func (s *sink) pid() int { return s.cmd.Process.Pid }

// kill ends the sink as a crash does, and waits for it.
func (s *sink) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// endOrphan ends the child that outlived the sink.
func (s *sink) endOrphan() { syscall.Kill(s.orphan, syscall.SIGKILL) }

// Answers of ask beside a pid.
const (
	refused = "refused"
	silence = "silence"
	cut     = "cut" // accepted, and closed without an answer: the sink was killed
)

// patience is how long ask waits for an answer: longer than the machine stalls.
var patience = 3 * time.Second

// ask sends from one address to another over udp or tcp and returns who
// answered.
func ask(t testing.TB, proto string, from netip.Addr, to netip.AddrPort) string {
	t.Helper()
	var c net.Conn
	var err error
	if proto == "udp" {
		c, err = net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(to))
	} else {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: patience}
		d.SetMultipathTCP(false)
		c, err = d.Dial("tcp", to.String())
	}
	b := make([]byte, 64)
	n := 0
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		if proto == "udp" {
			c.Write([]byte("x"))
		}
		n, err = c.Read(b)
	}
	var ne net.Error
	switch {
	case err == nil:
		return string(b[:n])
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return refused
	case errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE):
		return cut
	case errors.As(err, &ne) && ne.Timeout():
		return silence
	}
	t.Fatalf("%s %s to %s: %v", proto, from, to, err)
	return ""
}

// sources are n loopback addresses.
func sources(n int) []netip.Addr {
	var out []netip.Addr
	for i := range n {
		out = append(out, netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(1 + i%250)}))
	}
	return out
}

// underTest is the engine of worlds that name none.
var underTest = EngineSkLookup

// eachEngine runs a test with both: what users see is the same.
func eachEngine(t *testing.T, test func(t *testing.T)) {
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			underTest = kind
			defer func() { underTest = EngineSkLookup }()
			test(t)
		})
	}
}

// world is a service on the loopback of the test's namespace.
type world struct {
	t    testing.TB
	root *kernel.Root
	cfg  Config
}

func newWorld(t testing.TB, options Options, listen ...string) *world {
	t.Helper()
	nstest.NeedRoot(t)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + strings.NewReplacer("/", "-", "#", "-").Replace(t.Name()))
	w := &world{t: t, root: root}
	if options.Engine == "" {
		options.Engine = underTest
	}
	s := Service{Spec: service.Spec{Name: "svc"}, Options: options}
	for _, l := range listen {
		parsed, err := service.ParseListen(l)
		if err != nil {
			t.Fatal(err)
		}
		s.Listen = append(s.Listen, parsed)
	}
	w.cfg.Services = []Service{s}
	t.Cleanup(func() {
		w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
		if _, err := os.Stat(root.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pins left at %s", root.Path())
		}
	})
	return w
}

// member gives a slot to a process in the configuration.
func (w *world) member(slot int, s *sink, bound ...string) {
	m := service.Member{Slot: slot, PID: s.pid()}
	for _, b := range bound {
		l, err := service.ParseListen(b)
		if err != nil {
			w.t.Fatal(err)
		}
		m.Bound = append(m.Bound, l)
	}
	members := &w.cfg.Services[0].Members
	for i := range *members {
		if (*members)[i].Slot == slot {
			(*members)[i] = m
			return
		}
	}
	*members = append(*members, m)
}

func (w *world) locked(f func(*kernel.WriteLock) error) {
	w.t.Helper()
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	if err := f(l); err != nil {
		w.t.Fatal(err)
	}
}

// apply applies the configuration and returns the plan.
func (w *world) apply() []string {
	w.t.Helper()
	var steps []string
	w.locked(func(l *kernel.WriteLock) error {
		if errs := w.cfg.Validate(); len(errs) > 0 {
			return errors.Join(errs...)
		}
		if err := Mend(l); err != nil {
			return err
		}
		st, err := ReadState(context.Background(), w.root)
		if err != nil {
			return err
		}
		p, err := Feature{}.Plan(context.Background(), st, w.cfg)
		if err != nil {
			return err
		}
		for _, s := range p.Steps {
			steps = append(steps, s.String())
		}
		return Feature{}.Apply(context.Background(), l, p)
	})
	return steps
}

func (w *world) state() *ServiceState {
	w.t.Helper()
	st, err := ReadState(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := st.Service("svc")
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) where(addrs ...netip.Addr) []Place {
	w.t.Helper()
	p, err := w.state().Where(WhatIf{}, addrs...)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}
