// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/daemon"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// runStay is a daemon for weir steer run. It answers on the named or inherited sockets until a signal ends it. It
// prints SIGHUP. SIGUSR1 ends it with status 7.
func runStay(listens []string) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGUSR1)
	for _, l := range listens {
		proto, addr, _ := strings.Cut(l, "=")
		if _, err := sinkSocket(proto, addr); err != nil {
			return err
		}
	}
	if n, _ := strconv.Atoi(os.Getenv("LISTEN_FDS")); n > 0 {
		if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
			return errors.New("LISTEN_PID is " + os.Getenv("LISTEN_PID"))
		}
		for fd := 3; fd < 3+n; fd++ {
			f := os.NewFile(uintptr(fd), "given")
			if p, err := net.FilePacketConn(f); err == nil {
				go answerDatagrams(p)
			} else if l, err := net.FileListener(f); err == nil {
				go answerConnections(l)
			} else {
				return err
			}
			f.Close()
		}
	}
	if confined, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); os.Getuid() != 0 && (err != nil || confined != 1 || os.Getenv("WEIR_TEST_SECRET") != "") {
		return fmt.Errorf("user %d: no_new_privs %d, %v, and root's environment: %q", os.Getuid(), confined, err, os.Environ())
	}
	fmt.Println("runs", os.Getpid(), os.Getuid(), os.Getenv("LISTEN_FDNAMES"))
	for s := range signals {
		if s == syscall.SIGUSR1 {
			os.Exit(7)
		}
		fmt.Println("hup")
	}
	return nil
}

// runSupervise is weir steer run: ROOT SCOPE SLOT FLAGS COMMAND…. It starts this binary again as the daemon or its
// launcher.
func runSupervise(f []string) error {
	switch f[0] {
	case "stay":
		return runStay(f[1:])
	case "launch":
		return syscall.Exec(f[1], f[1:], append(os.Environ(), fmt.Sprintf("LISTEN_PID=%d", os.Getpid())))
	}
	slot, err := strconv.Atoi(f[2])
	if err != nil {
		return err
	}
	v := daemon.Supervision{Slot: slots.Slot{Scope: f[1], Service: "svc", Slot: slot}, Command: f[4:], Log: slog.New(slog.DiscardHandler)}
	for flag := range strings.SplitSeq(f[3], ",") {
		switch flag {
		case "give":
			v.Give = true
		case "restart":
			v.Restart = true
		case "nobody":
			v.User = "65534"
			for _, e := range os.Environ() {
				if strings.HasSuffix(e, "=supervise") { // role of the child of this binary
					v.Env = append(v.Env, e)
				}
			}
		case "take-over":
			v.TakeOver = true
		case "replace":
			v.Replace = true
		}
	}
	v.Launch = func(argv []string) *exec.Cmd {
		return exec.Command("/proc/self/exe", append([]string{"launch"}, argv...)...)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGTERM, syscall.SIGUSR1)
	v.Signals = signals
	status, err := v.Run(context.Background(), kernel.OpenRoot(f[0]))
	if err != nil {
		return err
	}
	os.Exit(status)
	return nil
}

// supervised is a running runSupervise.
type supervised struct {
	t   *testing.T
	cmd *exec.Cmd
	out chan string // output lines of the daemon
}

func (w *world) supervise(t *testing.T, slot int, flags string, listens ...string) *supervised {
	t.Helper()
	// The daemon's user may not reach the binary's path.
	s := &supervised{t: t, cmd: nstest.Child("supervise", w.root.Path(), w.state().Scope(), slot, flags, "/proc/self/exe", "stay")}
	s.cmd.Args = append(s.cmd.Args, listens...)
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.out = make(chan string, 100)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(s.out)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			s.out <- lines.Text()
		}
	}()
	t.Cleanup(func() { s.cmd.Process.Kill(); s.cmd.Wait() })
	return s
}

// runs waits for the next run of the daemon.
func (s *supervised) runs() (pid, uid int, names string) {
	s.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if n, _ := fmt.Sscanf(s.says(), "runs %d %d %s", &pid, &uid, &names); n >= 2 {
			if p, err := pidfd.Open(pid); err == nil { // it may outlive its supervisor
				s.t.Cleanup(func() { unix.PidfdSendSignal(p.FD(), unix.SIGKILL, nil, 0); p.Close() })
			}
			return pid, uid, names
		}
	}
	s.t.Fatal("the daemon did not run")
	return 0, 0, ""
}

// says returns the daemon's next line.
func (s *supervised) says() string {
	s.t.Helper()
	select {
	case line, ok := <-s.out:
		if ok {
			return line
		}
		s.t.Fatal("the daemon has ended")
	case <-time.After(time.Minute):
		s.t.Fatal("the daemon says nothing")
	}
	return ""
}

func (s *supervised) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// ends waits until the supervisor exits.
func (s *supervised) ends(status int) {
	s.t.Helper()
	s.cmd.Wait()
	if got := s.cmd.ProcessState.ExitCode(); got != status {
		s.t.Errorf("ended with %d (%v), want %d", got, s.cmd.ProcessState, status)
	}
}

// end makes the supervisor end its daemon and itself, if it runs.
func (s *supervised) end() {
	s.cmd.Process.Signal(syscall.SIGTERM)
	s.cmd.Wait()
}

// empties waits until a slot has no member.
func (w *world) empties(slot int) {
	w.t.Helper()
	nstest.Eventually(w.t, func() error {
		if w.state().Slots[slot].Admitted() {
			return fmt.Errorf("slot %d is still admitted: %+v", slot, w.state().Slots[slot])
		}
		return nil
	})
}

func (w *world) answers(pid int) {
	w.t.Helper()
	for _, proto := range []string{"udp", "tcp"} {
		want := strconv.Itoa(pid)
		if pid == 0 {
			want = refused
		}
		if got := ask(w.t, proto, sources(1)[0], loopback4); got != want {
			w.t.Errorf("%s: %s answers, want %s", proto, got, want)
		}
	}
}

func TestRunADaemon(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	w.apply()
	s := w.supervise(t, 0, "", "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	pid, _, _ := s.runs()
	w.admitted(0, pid)
	w.answers(pid)
	second := w.supervise(t, 0, "", "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	second.cmd.Stderr = nil
	second.ends(1) // the slot is occupied
	s.signal(syscall.SIGHUP)
	if got := s.says(); got != "hup" {
		t.Errorf("after SIGHUP it says %q", got)
	}
	s.signal(syscall.SIGUSR1)
	s.ends(7)
	if w.state().Slots[0].Admitted() {
		t.Error("the daemon has ended, its slot is admitted")
	}
	w.answers(0)
	s = w.supervise(t, 0, "", "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	pid, _, _ = s.runs()
	w.admitted(0, pid)
	s.signal(syscall.SIGTERM)
	s.ends(128 + int(syscall.SIGTERM))
}

// TestRunIsKilled kills weir steer run. The daemon keeps its traffic, and its exit is noticed.
func TestRunIsKilled(t *testing.T) {
	for _, flags := range []string{"", "give", "give,restart"} {
		t.Run(flags, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			w.apply()
			var own []string
			if flags == "" {
				own = []string{"udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"}
			}
			s := w.supervise(t, 0, flags, own...)
			pid, _, _ := s.runs()
			w.admitted(0, pid)
			s.signal(syscall.SIGKILL)
			s.cmd.Wait()
			w.answers(pid)
			// The next one does not start beside it, unless requested.
			w.supervise(t, 0, flags, own...).ends(1)
			w.answers(pid)
			next := w.supervise(t, 0, flags+",take-over", own...)
			successor, _, _ := next.runs()
			w.admitted(0, successor)
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			w.answers(successor)
			next.signal(syscall.SIGKILL)
			next.cmd.Wait()
			if err := syscall.Kill(successor, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			w.empties(0)
			w.answers(0)
		})
	}
}

// TestRunKeepsGivenSockets: traffic waiting in given sockets after the daemon's death is served by its next run.
func TestRunKeepsGivenSockets(t *testing.T) {
	t.Setenv("WEIR_TEST_SECRET", "root's")
	w := newWorld(t, spec.Options{Slots: 2}, "udp :9991", "tcp 0.0.0.0:9991")
	w.apply()
	var both []*supervised
	pids := map[int]int{}
	for slot := range 2 { // they share the port
		s := w.supervise(t, slot, "give,restart,nobody")
		both = append(both, s)
		pid, uid, names := s.runs()
		if uid != 65534 || names != "udp-9991:tcp-9991" {
			t.Errorf("the daemon runs as %d with %q", uid, names)
		}
		pids[slot] = pid
		w.admitted(slot, pid)
	}
	for _, s := range socketsOn(t, 9991) {
		if s.UID != 65534 {
			t.Errorf("%s belongs to user %d", s.Local, s.UID)
		}
	}
	from := sources(1)[0]
	slot := w.where(from)[0].Slot
	freeze(t, pids[slot])
	udp, err := net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(loopback4))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	tcp, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}).Dial("tcp", loopback4.String())
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	if _, err := udp.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pids[slot], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if !w.state().Slots[slot].Admitted() {
		t.Error("the slot is empty though its sockets are kept")
	}
	pid, _, _ := both[slot].runs()
	for name, c := range map[string]net.Conn{"datagram": udp, "connection": tcp} {
		b := make([]byte, 32)
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if n, err := c.Read(b); err != nil || string(b[:n]) != strconv.Itoa(pid) {
			t.Errorf("the %s that waited: %q, %v; want %d", name, b[:n], err, pid)
		}
	}
	w.admitted(slot, pid) // its new process is recorded
	w.answers(pid)
	both[slot].signal(syscall.SIGTERM)
	both[slot].ends(128 + int(syscall.SIGTERM))
	w.empties(slot)
	w.answers(0)
	both[1-slot].signal(syscall.SIGTERM)
	both[1-slot].ends(128 + int(syscall.SIGTERM))
	if left := socketsOn(t, 9991); len(left) > 0 {
		t.Errorf("sockets are left: %+v", left)
	}
}

// socketsOn returns the listeners and UDP sockets on a port.
func socketsOn(t *testing.T, port uint16) []sockdiag.Socket {
	t.Helper()
	udp, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: port, States: 1 << unix.BPF_TCP_CLOSE})
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: port, States: 1 << unix.BPF_TCP_LISTEN})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(udp, tcp)
}
