// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/sockholder"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd { return nstest.Child("hold", root, scope, kind) }
	nstest.Play(map[string]nstest.Role{"sink": runSink, "inheritor": runInheritor, "change": runChange, "upgrade": runUpgrade, "live": runLive, "bind": runBind, "hold": playHold,
		"recorder": runRecorder, "reader": runReader, "supervise": runSupervise})
	nstest.Main(m)
}

func playHold(f []string) error {
	return sockholder.Run(context.Background(), kernel.OpenRoot(f[0]), f[1], spec.Engine(f[2]))
}

func sinkSocket(proto, addr string) (sinkConn, error) {
	reuse := !strings.HasSuffix(proto, "!")
	proto = strings.TrimSuffix(proto, "!")
	// tcp4~ keeps its connections open, like a collector of sessions.
	keeps := strings.HasSuffix(proto, "~")
	proto = strings.TrimSuffix(proto, "~")
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if reuse {
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
		})
	}}
	lc.SetMultipathTCP(false)
	if strings.HasPrefix(proto, "udp") {
		p, err := lc.ListenPacket(context.Background(), proto, addr)
		if err != nil {
			return nil, err
		}
		go answerDatagrams(p)
		return p.(*net.UDPConn), nil
	}
	l, err := lc.Listen(context.Background(), proto, addr)
	if err != nil {
		return nil, err
	}
	if keeps {
		go keepConnections(l)
	} else {
		go answerConnections(l)
	}
	return l.(*net.TCPListener), nil
}

func answerDatagrams(p net.PacketConn) {
	me, b := fmt.Append(nil, os.Getpid()), make([]byte, 2048)
	for {
		_, from, err := p.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err == nil {
			p.WriteTo(me, from)
		}
	}
}

func answerConnections(l net.Listener) {
	me := fmt.Append(nil, os.Getpid())
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Write(me)
		c.Close()
	}
}

// keepConnections answers connections and keeps them open, like a collector of sessions.
func keepConnections(l net.Listener) {
	me := fmt.Append(nil, os.Getpid())
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Write(me)
		go func() {
			io.Copy(io.Discard, c) // until the router closes it
			c.Close()
		}()
	}
}

// sink is a running collector for tests.
type sink struct {
	*nstest.Process
	t      testing.TB
	orphan int // latest child that outlives it
}

func startSink(t testing.TB, listens ...string) *sink {
	t.Helper()
	return startSinkAs(t, 0, listens...)
}

// startSinkAs starts a sink as another user.
func startSinkAs(t testing.TB, uid uint32, listens ...string) *sink {
	t.Helper()
	nstest.NeedRoot(t)
	c := nstest.Child("sink")
	c.Args = append(c.Args, listens...)
	c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	return &sink{Process: nstest.StartReady(t, c), t: t}
}

// do sends a command to the sink. Its remaining processes end with the test.
func (s *sink) do(line string) {
	s.t.Helper()
	s.Tell(line)
	for {
		said, ok := s.Line()
		orphan, isOrphan := strings.CutPrefix(said, "orphan ")
		switch {
		case ok && said == "done":
			return
		case ok && isOrphan:
			pid, err := strconv.Atoi(orphan)
			if err != nil {
				s.t.Fatalf("sink said %q", said)
			}
			s.orphan = pid
			s.t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
		default:
			s.t.Fatalf("sink said %q to %q, want done", said, line)
		}
	}
}

func (s *sink) pid() int { return s.PID() }

// kill kills the sink and waits for it.
func (s *sink) kill() { s.Kill() }

// endOrphan kills the child that outlived the sink.
func (s *sink) endOrphan() { syscall.Kill(s.orphan, syscall.SIGKILL) }

// Results of ask other than a PID.
const (
	refused = "refused"
	silence = "silence"
	cut     = "cut" // accepted, then closed without an answer: the sink was killed
)

// patience is the time that ask waits for an answer. It exceeds the stalls of a busy machine, because a timeout counts
// as a loss. Tests that expect silence reduce it.
var patience = patienceUsual

const patienceUsual = 30 * time.Second

// ask sends from one address to another over udp or tcp and returns the answer.
func ask(t testing.TB, proto string, from netip.Addr, to netip.AddrPort) string {
	t.Helper()
	got, err := askPatiently(proto, from, to, patience, patience, func() bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// askPatiently is ask with a connection timeout. It waits for the answer as long as patient returns true, called at the
// given interval.
func askPatiently(proto string, from netip.Addr, to netip.AddrPort, connect, every time.Duration, patient func() bool) (string, error) {
	var c net.Conn
	var err error
	if proto == "udp" {
		c, err = net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(to))
	} else {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: connect}
		d.SetMultipathTCP(false)
		c, err = d.Dial("tcp", to.String())
	}
	b := make([]byte, 64)
	n := 0
	if err == nil {
		defer c.Close()
		if proto == "udp" {
			c.Write([]byte("x"))
		}
		for ok := true; ok; ok = errors.Is(err, os.ErrDeadlineExceeded) && patient() {
			c.SetDeadline(time.Now().Add(every))
			n, err = c.Read(b)
		}
	}
	var ne net.Error
	switch {
	case err == nil:
		return string(b[:n]), nil
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return refused, nil
	case errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE):
		return cut, nil
	case errors.As(err, &ne) && ne.Timeout():
		return silence, nil
	}
	return "", fmt.Errorf("%s %s to %s: %w", proto, from, to, err)
}

// sources returns n loopback addresses.
func sources(n int) []netip.Addr {
	var out []netip.Addr
	for i := range n {
		out = append(out, netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(1 + i%250)}))
	}
	return out
}

// underTest is the default engine of worlds.
var underTest = spec.EngineSkLookup

// eachEngine runs a test with both engines, because users see the same behavior.
func eachEngine(t *testing.T, test func(t *testing.T)) {
	for _, kind := range record.Engines {
		t.Run(string(kind), func(t *testing.T) {
			underTest = kind
			defer func() { underTest = spec.EngineSkLookup }()
			test(t)
		})
	}
}

// world is a service on the loopback of the test's namespace.
type world struct {
	t    testing.TB
	root *kernel.Root
	cfg  spec.Config

	slotOf map[uint64]int // by cookie of a member's socket
}

type lock = *kernel.WriteLock

func newWorld(t testing.TB, options spec.Options, listen ...string) *world {
	t.Helper()
	nstest.NeedRoot(t)
	root := kernel.OpenRoot(nstest.BPFFS + "/" + strings.NewReplacer("/", "-", "#", "-").Replace(t.Name()))
	w := &world{t: t, root: root}
	if options.Engine == "" {
		options.Engine = underTest
	}
	s := spec.Service{Spec: service.Spec{Name: "svc"}, Options: options}
	for _, l := range listen {
		parsed, err := service.ParseListen(l)
		if err != nil {
			t.Fatal(err)
		}
		s.Listen = append(s.Listen, parsed)
	}
	w.cfg.Services = []spec.Service{s}
	t.Cleanup(func() {
		w.remove()
		if _, err := os.Stat(root.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pins left at %s", root.Path())
		}
	})
	return w
}

// member configures a process as the member of a slot.
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

// remove removes everything and waits until the kernel has detached the programs, some time after they were unpinned. A
// remaining program would steer the next test's packets with the old maps.
func (w *world) remove() {
	w.t.Helper()
	attached := w.links()
	w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
	for _, o := range attached {
		nstest.Until(w.t, "a link that was removed is gone", func() bool { return !o.exists() })
	}
}

// links returns the links pinned below the world's root, including the leftovers of a killed process.
func (w *world) links() (all []object) {
	w.t.Helper()
	err := filepath.WalkDir(w.root.Path(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasPrefix(d.Name(), "link_") {
			return err
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := l.Info()
		if err == nil {
			all = append(all, object{"link", uint32(info.ID)})
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.t.Fatal(err)
	}
	return all
}

// apply applies the configuration and returns the plan.
func (w *world) apply() []string {
	w.t.Helper()
	if errs := w.cfg.Validate(); len(errs) > 0 {
		w.t.Fatal(errors.Join(errs...))
	}
	steps, err := featuretest.Apply(context.Background(), w.root, Feature{}, w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return steps
}

func (w *world) state() *state.Service {
	w.t.Helper()
	st, err := state.Read(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := st.Service("svc")
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) where(addrs ...netip.Addr) []state.Assignment {
	w.t.Helper()
	p, err := w.state().Where(state.WhatIf{}, addrs...)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}
