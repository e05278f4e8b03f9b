// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// reachable returns a socket path open to every user: t.TempDir is for root only.
func reachable(t *testing.T, socket string) string {
	t.Helper()
	for dir := filepath.Dir(socket); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return socket
}

// TestStrangerThatDoesNotRead checks that few messages are queued for a process that does not read, and that its long
// texts are freed.
func TestStrangerThatDoesNotRead(t *testing.T) {
	k, socket := run(t, Options{})
	m := connect(t, socket)
	bad := &wire.Message{Type: wire.Hello, Seq: 1, Text: strings.Repeat("\x01", wire.MaxText), Name: "0"}
	sent := 0
	nstest.Until(t, "the keeper has closed the connection", func() bool {
		err := m.TrySend(bad)
		for ; err == nil; err = m.TrySend(bad) {
			if sent++; sent > 20_000 {
				t.Fatal("20,000 answers wait for a stranger")
			}
		}
		return !errors.Is(err, wire.ErrFull)
	})
	nstest.Until(t, "nothing that waited for it counts", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.queued) == 0
	})
}

// TestQueueOfUser checks that all connections of a user share one bound of queued bytes.
func TestQueueOfUser(t *testing.T) {
	k := New(Options{})
	v := k.service("x")
	a := &member{process: &process{Peer: Peer{UID: 7}}, service: v}
	b := &member{process: &process{Peer: Peer{UID: 7}}, service: v}
	other := &member{process: &process{Peer: Peer{UID: 8}}, service: v}
	large := &wire.Message{State: make([]byte, 1<<20)}
	n := 0
	for _, m := range []*member{a, b} {
		for k.queues(m, large) {
			m.queue = append(m.queue, outgoing{message: *large})
			n++
		}
	}
	if n < 60 || n > 64 {
		t.Errorf("%d MiB wait for a user", n)
	}
	if !k.queues(other, large) {
		t.Error("another user's message does not wait")
	}
	k.unqueues(other, large)
	k.dequeue(a)
	k.dequeue(b)
	if len(k.queued) != 0 {
		t.Errorf("%v is counted of nothing", k.queued)
	}
}

// TestTolls checks that a user above the CPU share waits, and no other.
func TestTolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := New(Options{})
		ask := func(uid uint32, cost time.Duration) time.Duration {
			began := time.Now()
			k.pay(t.Context(), &member{process: &process{Peer: Peer{UID: uid}}, cost: cost})
			return time.Since(began)
		}
		began, n := time.Now(), 0
		for time.Since(began) < time.Minute {
			ask(7, refusalCost)
			n++
		}
		if most := int((tollBurst + time.Duration(tollShare*float64(time.Minute))) / refusalCost); n < most/2 || n > most*11/10 {
			t.Errorf("%d refusals in a minute, want about %d", n, most)
		}
		if d := ask(8, time.Millisecond) + ask(0, time.Hour) + ask(7, 0); d != 0 {
			t.Errorf("others wait for %v", d)
		}
		if d := ask(7, time.Hour); d != maxPay {
			t.Errorf("one request waits for %v", d)
		}
	})
}

// TestFloodOfReports checks that a user gets one report at a time, after the cost of earlier ones is paid. Other
// users do not wait.
func TestFloodOfReports(t *testing.T) {
	nstest.NeedRoot(t)
	k, socket := run(t, Options{Allow: func(context.Context, string, string, Peer) error { return nil }})
	reachable(t, socket)
	const uid, n = 65534, 40
	k.tolls.charge(uid, time.Hour, time.Now())
	answered := make(chan error, n)
	nstest.AsUser(t, uid, func() error {
		for range n {
			c, err := wire.Dial(t.Context(), socket)
			if err != nil {
				return err
			}
			t.Cleanup(func() { c.Close() })
			if err := c.Send(&wire.Message{Type: wire.Status, Seq: 1}); err != nil {
				return err
			}
			go func() {
				_, _, err := c.Receive()
				answered <- err
			}()
		}
		return nil
	})
	m := connect(t, socket)
	for range 10 {
		m.say(&wire.Message{Type: wire.Status, Seq: 1})
		m.hear(wire.Report)
	}
	select {
	case err := <-answered:
		t.Fatalf("a user who owes an hour has a report: %v", err)
	case <-time.After(3 * askTurn):
	}
	k.tolls.mu.Lock()
	k.tolls.debt = nil
	k.tolls.mu.Unlock()
	for range n {
		select {
		case err := <-answered:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("there is no report when nothing is owed")
		}
	}
}

// TestDropOfLingeringSessions checks that dropped sockets are closed despite SO_LINGER, without a thread each.
func TestDropOfLingeringSessions(t *testing.T) {
	_, socket := run(t, Options{})
	m := hello(t, socket, "x", "0")
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(l)
	const n = 150
	if err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(l, n)); err != nil {
		t.Fatal(err)
	}
	to, err := unix.Getsockname(l)
	if err != nil {
		t.Fatal(err)
	}
	var ids []uint64
	for i := range n {
		fd, id := lingering(t, to)
		m.say(&wire.Message{Type: wire.Keep, Seq: uint32(i + 2), Session: id, Number: uint32(wire.Stream)}, fd)
		m.hear(wire.OK)
		unix.Close(fd)
		ids = append(ids, id)
	}
	before := threads(t)
	for _, id := range ids {
		m.say(&wire.Message{Type: wire.Drop, Seq: 1, Session: id})
		m.hear(wire.OK)
	}
	nstest.Steadily(t, 50*time.Millisecond, func() error { // waiting threads would exist by then
		if now := threads(t); now > before+60 {
			return fmt.Errorf("%d threads, %d before %d sessions with SO_LINGER were dropped", now, before, n)
		}
		return nil
	})
}

// lingering returns a connection with SO_LINGER of an hour, and unacknowledged data.
func lingering(t *testing.T, to unix.Sockaddr) (fd int, id uint64) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4608), unix.Connect(fd, to), unix.SetNonblock(fd, true))
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.Write(fd, b)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	if id, err = sock.Cookie(fd); err != nil {
		t.Fatal(err)
	}
	return fd, id
}

func threads(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
