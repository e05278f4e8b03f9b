// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/internal/nstest"
	fmt "github.com/weir-project/weir/internal/printable"
)

// Under systemd a keeper restarts while a session and a listener wait for a member. The next member continues both. The
// unit has the settings of examples/weir-serve.service.
func TestKeeperRestartsUnderSystemd(t *testing.T) {
	for name, args := range map[string]string{"keep": "handoff keep --keeper", "serve": "--root " + nstest.BPFFS + "/keeper-apart serve --only keeper --handoff-socket"} {
		t.Run(name, func(t *testing.T) { restartsUnderSystemd(t, args) })
	}
}

// restartsUnderSystemd runs the test with a keeper of this command line. The line ends before the socket argument.
func restartsUnderSystemd(t *testing.T, args string) {
	nstest.NeedRoot(t)
	dir := buildWeir(t)
	nstest.Enter(t)
	socket := filepath.Join(dir, "keeper.sock")
	systemctl := nstest.Systemd(t, map[string]string{"keeper.service": "[Service]\nExecStart=" + filepath.Join(dir, "weir") + " " + args + " " + socket + "\n" + storeLine(t) + "\n"})
	must := mustRun(t, systemctl)
	must("start", "keeper.service")
	listen := func() *handoff.Listener {
		t.Helper()
		var l *handoff.Listener
		nstest.Eventually(t, func() (err error) {
			l, err = handoff.Listen(t.Context(), "tcp", "127.0.0.1:1790", handoff.Options{Service: "bmp", Name: "0", Keeper: socket})
			return err
		})
		return l
	}
	accept := func(l *handoff.Listener) *handoff.Session {
		t.Helper()
		late := time.AfterFunc(60*time.Second, func() { l.Close() })
		defer late.Stop()
		s, err := l.AcceptSession()
		if err != nil {
			t.Fatal(err)
		}
		s.SetDeadline(time.Now().Add(60 * time.Second))
		return s
	}
	read := func(c io.Reader, want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
			t.Fatalf("read %q, %v; want %q", b, err, want)
		}
	}
	l := listen()
	peer := dialHere(t)
	peer.Write([]byte("one tw"))
	s := accept(l)
	read(s, "one tw")
	s.Write([]byte("1 "))
	if err := s.CommitExcept(len("tw"), []byte("after one")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second restart finds the sockets again
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		queued := dialHere(t)
		queued.Write([]byte("queued"))
		must("restart", "keeper.service")
		l = listen()
		// The queued connection and the waiting one, in either order.
		var seen int
		for range 2 {
			x := accept(l)
			if !x.Received() {
				read(x, "queued")
				if err := x.Close(); err != nil {
					t.Error(err)
				}
				seen |= 1
				continue
			}
			if s = x; string(s.State()) != "after one" {
				t.Errorf("the state is %q", s.State())
			}
			seen |= 2
		}
		if seen != 3 {
			t.Fatalf("of the two sessions came %b", seen)
		}
	}
	read(peer, "1 ")
	peer.Write([]byte("o three"))
	read(s, "two three")
	// systemd's store becomes empty after the session's end has reached the peer. systemd notices this late.
	nstest.Eventually(t, func() error {
		out, err := systemctl("show", "--property=NFileDescriptorStore", "keeper.service")
		if err != nil || strings.TrimSpace(out) != "NFileDescriptorStore=0" {
			return fmt.Errorf("%s, %v", out, err)
		}
		return nil
	})
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n, err := peer.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("after the end: %d bytes, %v", n, err)
	}
	l.Close()
}

// buildWeir returns a folder with a weir binary. A process in another mount namespace cannot build one.
func buildWeir(t *testing.T) string {
	t.Helper()
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("need: tool go")
	}
	dir := t.TempDir()
	if out, err := exec.Command(tool, "build", "-o", dir, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir
}

// dialHere connects from the test's thread, in its namespace.
func dialHere(t *testing.T) *net.TCPConn {
	t.Helper()
	c, err := net.DialTCP("tcp4", nil, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1790})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(2 * time.Minute))
	return c
}

// storeLine returns the descriptor store setting of the example unit.
func storeLine(t *testing.T) string {
	t.Helper()
	unit, err := os.ReadFile("../../examples/weir-serve.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(unit)) {
		if strings.HasPrefix(line, "FileDescriptorStoreMax=") {
			return strings.TrimSpace(line)
		}
	}
	t.Fatal("the example has no FileDescriptorStoreMax=")
	return ""
}
