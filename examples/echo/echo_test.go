// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"echo": func(args []string) error { return run(args) }})
	nstest.Main(m)
}

// Addresses not on any interface.
const (
	prefix4, prefix6 = "192.0.2.0/24", "2001:db8:7::/64"
	every4, every6   = "192.0.2.77", "2001:db8:7::77" // bound with every port
)

func binding(prefix string, port uint16) bindings.Binding {
	p, err := bindings.ParsePrefix(prefix)
	if err != nil {
		panic(err)
	}
	return bindings.Binding{Service: "echo", Prefix: p, Port: port, Proto: unix.IPPROTO_UDP}
}

// serve serves UDP at addresses and binds the prefixes to the service.
func serve(t *testing.T, addresses ...string) {
	t.Helper()
	nstest.NeedRoot(t)
	for _, prefix := range []string{prefix4, prefix6} {
		if out, err := exec.Command("ip", "route", "replace", "local", prefix, "dev", "lo").CombinedOutput(); err != nil {
			t.Fatalf("ip route: %v: %s", err, out)
		}
	}
	streams, packets, err := open(addresses)
	if err != nil {
		t.Fatal(err)
	}
	var sockets []bindings.Registration
	for i, c := range packets {
		streams[i].Close()
		t.Cleanup(func() { c.Close() })
		raw, err := c.SyscallConn()
		if err == nil {
			err = control(raw, func(fd int) error {
				sockets = append(sockets, bindings.Registration{Service: "echo", FD: fd}) // open until the end of the test
				return nil
			})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	root := kernel.OpenRoot(filepath.Join(nstest.BPFFS, fmt.Sprintf("echo_%d", time.Now().UnixNano()%1e9)))
	locked := func(f func(l *kernel.WriteLock) error) {
		t.Helper()
		l, err := root.Lock(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Unlock()
		if err := f(l); err != nil {
			t.Fatal(err)
		}
	}
	locked(func(l *kernel.WriteLock) error {
		_, err := bindings.RegisterSockets(l, ns, sockets)
		if err != nil {
			return err
		}
		_, err = bindings.AddBindings(l, ns, []bindings.Binding{
			binding(prefix4, 4321), binding(prefix4, 9999), binding(every4, 0),
			binding(prefix6, 4321), binding(prefix6, 9999), binding(every6, 0),
		})
		return err
	})
	t.Cleanup(func() {
		ns, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		locked(func(l *kernel.WriteLock) error { _, err := bindings.ReplaceBindings(l, ns, nil); return err })
		locked(func(l *kernel.WriteLock) error {
			_, err := bindings.UnregisterSockets(l, ns, "echo")
			if errors.Is(err, kernel.ErrNotExist) {
				err = nil // removed with the last binding, if they were closed first
			}
			return err
		})
	})
	for _, c := range packets {
		go serveUDP(c) // until it is closed
	}
}

// ask sends data and returns the answer. The client's socket is connected, so the kernel drops
// answers from other addresses or ports.
func ask(c net.Conn, data []byte) ([]byte, error) {
	if _, err := c.Write(data); err != nil {
		return nil, err
	}
	answer := make([]byte, 65535)
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	n, err := c.Read(answer)
	return answer[:n], err
}

func wantEcho(t *testing.T, to string, data []byte) {
	t.Helper()
	c, err := net.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := ask(c, data); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%s answers %d bytes, want %d: %v", to, len(got), len(data), err)
	}
}

// TestAnswersFromWhereItWasAsked checks the source of answers, for sockets bound to one address and
// for one of both families.
func TestAnswersFromWhereItWasAsked(t *testing.T) {
	for _, addresses := range [][]string{{"127.0.0.1:9999", "[::1]:9999"}, {":9999"}} {
		t.Run(fmt.Sprint(addresses), func(t *testing.T) {
			serve(t, addresses...)
			for _, to := range []string{
				"192.0.2.23:9999", "[2001:db8:7::23]:9999", // the socket's port
				"192.0.2.23:4321", "[2001:db8:7::23]:4321", // another port
				every4 + ":53", "[" + every6 + "]:53", every4 + ":40000", "[" + every6 + "]:40000",
				"127.0.0.1:9999", "[::1]:9999", // no binding
			} {
				wantEcho(t, to, []byte("hello "+to))
				wantEcho(t, to, nil)
			}
			wantEcho(t, "192.0.2.23:9999", make([]byte, 65507))
			wantEcho(t, "192.0.2.23:4321", make([]byte, 65507))
		})
	}
}

// TestAnswersFromOnePortAtOnce checks that many clients of one address and port get all their
// answers from it at once.
func TestAnswersFromOnePortAtOnce(t *testing.T) {
	serve(t, ":9999")
	var all sync.WaitGroup
	for _, to := range []string{every4 + ":5353", "[" + every6 + "]:5353"} {
		for range 8 {
			all.Go(func() {
				c, err := net.Dial("udp", to)
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				for i := range 100 {
					want := fmt.Appendf(nil, "%d", i)
					if got, err := ask(c, want); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%s, question %d: %q, %v", to, i, got, err)
						return
					}
				}
			})
		}
	}
	all.Wait()
}

// TestAnswerSocketTakesNothing checks that the unconnected socket of replyFromPort receives nothing
// meant for the service.
func TestAnswerSocketTakesNothing(t *testing.T) {
	serve(t, "127.0.0.1:9999", "[::1]:9999")
	for _, at := range []string{every4 + ":7000", "[" + every6 + "]:7000"} {
		config := net.ListenConfig{Control: answerFrom}
		p, err := config.ListenPacket(t.Context(), "udp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		c, err := net.Dial("udp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for i := range 20 {
			want := fmt.Appendf(nil, "%d", i)
			if got, err := ask(c, want); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s, question %d beside the socket: %q, %v", at, i, got, err)
			}
		}
		if err := p.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, _, err := p.ReadFrom(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the socket took %d bytes, %v", at, n, err)
		}
		// Connected, the same socket receives the client's datagrams: this test can fail.
		raw, err := p.(*net.UDPConn).SyscallConn()
		if err == nil {
			client := c.LocalAddr().(*net.UDPAddr).AddrPort()
			err = control(raw, func(fd int) error {
				if client.Addr().Is4() {
					return unix.Connect(fd, &unix.SockaddrInet4{Addr: client.Addr().As4(), Port: int(client.Port())})
				}
				return unix.Connect(fd, &unix.SockaddrInet6{Addr: client.Addr().As16(), Port: int(client.Port())})
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("lost")); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 100)
		_ = p.SetReadDeadline(time.Now().Add(30 * time.Second))
		if n, _, err := p.ReadFrom(answer); err != nil || string(answer[:n]) != "lost" {
			t.Errorf("%s: connected, the socket took %q, %v", at, answer[:n], err)
		}
	}
}

// TestPassedSockets checks sockets bound by another process, as by systemd.
func TestPassedSockets(t *testing.T) {
	nstest.NeedRoot(t)
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", ":9998")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p, err := lc.ListenPacket(t.Context(), "udp", ":9998")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c := nstest.Child("echo")
	c.Env = append(c.Env, "LISTEN_FDS=2")
	for _, s := range []interface{ File() (*os.File, error) }{l.(*net.TCPListener), p.(*net.UDPConn)} {
		f, err := s.File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		c.ExtraFiles = append(c.ExtraFiles, f)
	}
	child := nstest.Start(t, c)
	child.Expect("listening on tcp [::]:9998")
	child.Expect("listening on udp [::]:9998")
	wantEcho(t, "127.0.0.7:9998", []byte("hello")) // by default the kernel would answer from 127.0.0.1
	wantEcho(t, "[::1]:9998", []byte("hello"))
	conn, err := net.Dial("tcp", "127.0.0.7:9998")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := ask(conn, []byte("hello")); err != nil || string(got) != "hello" {
		t.Errorf("TCP: %q, %v", got, err)
	}
	c = nstest.Child("echo")
	c.Env = append(c.Env, "LISTEN_FDS=1", "LISTEN_PID=1")
	if out, err := c.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("no sockets passed")) {
		t.Errorf("with another process's LISTEN_PID: %v, %s", err, out)
	}
}
