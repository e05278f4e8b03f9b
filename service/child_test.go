// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/units"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"daemon": serve, "exec stuck": execStuck})
	if os.Geteuid() != 0 {
		// It enters a network namespace, and an example cannot skip.
		if err := flag.Set("test.skip", "^ExampleMember_Adopt$"); err != nil {
			panic(err)
		}
	}
	nstest.Main(m)
}

// serve opens sockets such as "udp4 0.0.0.0:53", "tcp6 [::]:53" (without IPv4), "mptcp 0.0.0.0:53" and "connected
// 127.0.0.1:53". It reports them and keeps them open until its input ends.
func serve(sockets []string) error {
	var open []io.Closer
	for _, s := range sockets {
		c, err := openSocket(s)
		if err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
		open = append(open, c)
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	for _, c := range open {
		c.Close()
	}
	return err
}

func openSocket(s string) (io.Closer, error) {
	proto, addr, _ := strings.Cut(s, " ")
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(cerr, err)
	}}
	lc.SetMultipathTCP(proto == "mptcp")
	switch {
	case proto == "mptcp":
		return lc.Listen(context.Background(), "tcp4", addr)
	case proto == "connected":
		local, err := net.ResolveUDPAddr("udp", addr)
		if err != nil {
			return nil, err
		}
		return net.DialUDP("udp", local, &net.UDPAddr{IP: local.IP, Port: 9})
	case strings.HasPrefix(proto, "udp"):
		return lc.ListenPacket(context.Background(), proto, addr)
	}
	return lc.Listen(context.Background(), proto, addr)
}

// daemon is a running serve.
type daemon struct{ *nstest.Process }

func (d *daemon) pid() int { return d.PID() }

func (d *daemon) end() { d.End() }

func start(t *testing.T, sockets ...string) *daemon { return startWith(t, nil, sockets...) }

// startWith calls configure on the command before starting it.
func startWith(t *testing.T, configure func(*exec.Cmd), sockets ...string) *daemon {
	t.Helper()
	nstest.NeedRoot(t)
	c := nstest.Child("daemon")
	c.Args = append(c.Args, sockets...)
	if configure != nil {
		configure(c)
	}
	return &daemon{nstest.StartReady(t, c)}
}

// elsewhere starts a daemon in a network namespace of its own.
func elsewhere(t *testing.T, sockets ...string) *daemon {
	t.Helper()
	return startWith(t, func(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET} }, sockets...)
}

// cgroup makes a cgroup and returns its path from the root of cgroup2. It is removed once its daemons have ended.
func cgroup(t *testing.T) string {
	t.Helper()
	nstest.NeedRoot(t)
	root, err := units.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("/weir-service-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "_"))
	if err := os.Mkdir(root+name, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// An ended process may stay in it briefly.
		if err := nstest.Poll(nstest.Timeout(), func() error { return os.Remove(root + name) }); err != nil {
			t.Error(err)
		}
	})
	return name
}

// moveTo moves a daemon to a cgroup.
func (d *daemon) moveTo(t *testing.T, cgroup string) {
	t.Helper()
	root, err := units.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+cgroup+"/cgroup.procs", fmt.Append(nil, d.pid()), 0); err != nil {
		t.Fatal(err)
	}
}

func pidFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pid")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// here returns the namespace of the tests.
func here(t *testing.T) *netns.Handle {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// adopt adopts m for a service and checks the result.
func adopt(t *testing.T, m Member, listens ...string) *Adoption {
	t.Helper()
	s := spec(t, listens)
	a, err := m.Adopt(t.Context(), here(t), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	eps := s.Endpoints()
	if len(a.Sockets) != len(eps) {
		t.Fatalf("%d sockets for %d endpoints", len(a.Sockets), len(eps))
	}
	for i, got := range a.Sockets {
		if got.Endpoint != eps[i] {
			t.Errorf("socket %d is for %s, want %s", i, got.Endpoint, eps[i])
		}
		cookie, err := unix.GetsockoptUint64(got.FD, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil || cookie != got.Socket.Cookie {
			t.Errorf("%s: descriptor %d has cookie %d, %v; want %d", got.Endpoint, got.FD, cookie, err, got.Socket.Cookie)
		}
		if !holds(t, got.PID, got.Socket.Inode) {
			t.Errorf("%s: process %d does not hold socket %d", got.Endpoint, got.PID, got.Socket.Inode)
		}
	}
	if !a.Alive() {
		t.Error("the member is taken to be dead")
	}
	return a
}

func holds(t *testing.T, pid int, inode uint32) bool {
	t.Helper()
	links, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && to == fmt.Sprintf("socket:[%d]", inode) {
			return true
		}
	}
	return false
}

// refuse checks that m cannot be adopted, with the error and text.
func refuse(t *testing.T, m Member, want error, text string, listens ...string) {
	t.Helper()
	a, err := m.Adopt(t.Context(), here(t), spec(t, listens))
	if err == nil {
		a.Close()
	}
	if !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v; want %v that says %q", m, err, want, text)
	}
}
