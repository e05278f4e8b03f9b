// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// udpServer is a socket for counting received datagrams.
type udpServer struct{ *net.UDPConn }

func listenUDP(t testing.TB, address string) udpServer {
	t.Helper()
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	u := c.(*net.UDPConn)
	raw, err := u.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// Independent of net.core.rmem_max, datagrams queue until the flood is over.
	var inner error
	err = raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20) })
	if err := errors.Join(err, inner); err != nil {
		t.Fatal(err)
	}
	return udpServer{u}
}

// received empties the queue and returns the number of its datagrams.
func (s udpServer) received(t testing.TB) (n int) {
	t.Helper()
	return s.receivedOf(t, 0)
}

// receivedOf is received with an expected number: it waits longer for these.
func (s udpServer) receivedOf(t testing.TB, should int) (n int) {
	t.Helper()
	n, err := drain(s.UDPConn, should)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// patience bounds the wait for expected events. It exceeds the stalls of a busy machine, and a
// passing test does not use it up.
const patience = 30 * time.Second

// drain reads until no datagram arrives for a while and the expected number is reached. It uses no
// read deadline: on a stalled machine a deadline may expire before the first read.
func drain(c *net.UDPConn, should int) (n int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	b := make([]byte, 2048)
	end := time.Now().Add(patience)
	for first := true; ; first = false {
		was := n
		if e := raw.Control(func(fd uintptr) {
			for ; err == nil; n++ {
				if _, _, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT); err != nil {
					return
				}
			}
		}); e != nil {
			return n, e
		}
		if !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		if n == was && !first && (n >= should || time.Now().After(end)) {
			return n, nil
		}
		err = nil
		time.Sleep(50 * time.Millisecond)
	}
}

// flood sends n datagrams of random bytes. It returns the time until the last one reached the
// guard.
func flood(t testing.TB, to net.Addr, n int) time.Duration {
	t.Helper()
	c, err := net.Dial("udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 64)
	start := time.Now()
	for range n {
		rand.Read(b)
		if _, err := c.Write(b); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	nstest.Eventually(t, func() error {
		if nstest.Backlog(t).Waiting > 0 {
			return errors.New("packets wait in a CPU's backlog, and nothing takes them")
		}
		return nil
	})
	return time.Since(start)
}

// debt returns the maximum time a guard may run ahead of its limit.
func debt(l Limit) time.Duration { return max(guardstate.MinDepth, 8*time.Second/time.Duration(l)) }

// most returns the maximum number of packets within a time: the limit's packets plus the maximum
// debt.
func most(l Limit, d time.Duration) int {
	return int(float64(l)*(d+debt(l)).Seconds()) + 1
}

func TestAttach(t *testing.T) {
	need(t)
	nstest.Enter(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "[::]:0"} { // the last one also receives IPv4
		t.Run(address, func(t *testing.T) {
			s := listenUDP(t, address)
			flood(t, s.LocalAddr(), 500)
			if n := s.receivedOf(t, 500); n != 500 {
				t.Fatalf("without a guard %d of 500 arrived", n)
			}
			const limit = 100
			g, err := client.Attach(s, limit)
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			took := flood(t, s.LocalAddr(), 5000)
			n := s.receivedOf(t, 1)
			if n == 0 || n > most(limit, took) {
				t.Errorf("%d of 5000 arrived in %v, want 1 to %d", n, took, most(limit, took))
			}
			if c := g.Counts(); c.Passed != uint64(n) || c.Passed+c.Refused != 5000 || !c.UnderAttack {
				t.Errorf("%d arrived, counted %+v", n, c)
			}
			if err := g.SetLimits(Limits{Total: limit, Dry: true}); err != nil {
				t.Fatal(err)
			}
			flood(t, s.LocalAddr(), 500)
			if n := s.receivedOf(t, 500); n != 500 {
				t.Errorf("in a dry run %d of 500 arrived", n)
			}
		})
	}
}

// TestAttachTop floods from one source and checks the reported patterns.
func TestAttachTop(t *testing.T) {
	need(t)
	nstest.Enter(t)
	s := listenUDP(t, "127.0.0.1:0")
	g, err := client.Attach(s, 10)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	flood(t, s.LocalAddr(), 20_000)
	found := map[string]string{}
	for _, p := range g.Counts().Top {
		if found[p.Level] == "" {
			found[p.Level] = p.Prefix
		}
	}
	want := map[string]string{"host": "127.0.0.1/32", "net": "127.0.0.0/24", "wide": "127.0.0.0/16", "port": "", "destination": s.LocalAddr().String()}
	for level, prefix := range want {
		if got, ok := found[level]; !ok || got != prefix {
			t.Errorf("level %s: %q, want %q (all: %v)", level, got, prefix, found)
		}
	}
}

// TestAttachLeavesFilters checks an application's own filter staying in place.
func TestAttachLeavesFilters(t *testing.T) {
	need(t)
	nstest.Enter(t)
	s := listenUDP(t, "127.0.0.1:0")
	raw, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// The filter drops everything.
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	var inner error
	err = raw.Control(func(fd uintptr) {
		inner = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop[0]})
	})
	if err := errors.Join(err, inner); err != nil {
		t.Fatal(err)
	}
	if g, err := client.Attach(s, 100); !errors.Is(err, kernel.ErrOccupied) {
		t.Fatalf("%v, %v: want ErrOccupied", g, err)
	}
	flood(t, s.LocalAddr(), 10)
	if n := s.received(t); n != 0 {
		t.Errorf("%d of 10 arrived: the socket's own filter is missing", n)
	}
	// A guard is a filter, too: a second one does not replace it.
	s = listenUDP(t, "127.0.0.1:0")
	g, err := client.Attach(s, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if _, err := client.Attach(s, 100); !errors.Is(err, kernel.ErrOccupied) {
		t.Errorf("a second guard: %v, want ErrOccupied", err)
	}
}

func TestAttachRefuses(t *testing.T) {
	need(t)
	nstest.Enter(t)
	s := listenUDP(t, "127.0.0.1:0")
	for _, l := range []Limit{0, MaxLimit + 1} {
		if _, err := client.Attach(s, l); err == nil {
			t.Errorf("limit %d: no error", uint64(l))
		}
	}
	for _, env := range []string{"x", "3", "998,999", ",", "0,0"} {
		t.Setenv(client.GrantEnv, env)
		if _, err := client.Attach(s, 100); err == nil || !strings.Contains(err.Error(), client.GrantEnv) {
			t.Errorf("%s=%q: got %v, want an error with the variable's name", client.GrantEnv, env, err)
		}
	}
}

// runAttach is an application. It guards a socket, prints its address and, after a line of input,
// the received and counted packets.
func runAttach([]string) error {
	s, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	g, err := client.Attach(s.(*net.UDPConn), 50)
	if err != nil {
		return err
	}
	defer g.Close()
	fmt.Println(s.LocalAddr())
	var line string
	if _, err := fmt.Scanln(&line); err != nil {
		return err
	}
	n, err := drain(s.(*net.UDPConn), 0)
	if err != nil {
		return err
	}
	c := g.Counts()
	fmt.Println(n, c.Passed, c.Refused)
	return nil
}

const nobody = 65534

// TestGrant gives a guard to an unprivileged application.
func TestGrant(t *testing.T) {
	need(t)
	nstest.Enter(t)
	c := nstest.Child("attach")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "weir guard grant") {
		t.Fatalf("without a grant: got %v, %s, want an error with the command weir guard grant", err, out)
	}

	g, err := client.NewGrant(50)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	c = nstest.Child("attach")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	c.ExtraFiles = g.Files()
	c.Env = append(c.Environ(), g.Env(3))
	p := nstest.Start(t, c)
	address, ok := p.Line()
	if !ok {
		t.Fatal(p.Wait())
	}
	to, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	took := flood(t, to, 3000)
	p.Tell("go")
	line, _ := p.Line()
	var came, passed, refused int
	if _, err := fmt.Sscan(line, &came, &passed, &refused); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if came == 0 || came > most(50, took) || came != passed || passed+refused != 3000 {
		t.Errorf("%d of 3000 arrived in %v, counted %d and %d", came, took, passed, refused)
	}
}
