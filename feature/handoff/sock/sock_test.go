// SPDX-License-Identifier: Apache-2.0

package sock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// connection returns a TCP connection over lo: the peer's end, this end, and this end's descriptor.
func connection(t testing.TB, address string) (peer, ours *net.TCPConn, fd int) {
	t.Helper()
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	o, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); o.Close() })
	return p.(*net.TCPConn), o.(*net.TCPConn), fdOf(t, o.(*net.TCPConn))
}

func fdOf(t testing.TB, c *net.TCPConn) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	raw.Control(func(n uintptr) { fd = int(n) })
	return fd
}

func want(t testing.TB, fd int, read, written uint64) {
	t.Helper()
	if p, err := ReadPositions(fd); err != nil || p.Read != read || p.Written != written {
		t.Errorf("positions %+v, %v; want read %d, written %d", p, err, read, written)
	}
}

// queued waits until n bytes are in the receive queue.
func queued(t testing.TB, fd, n int) {
	t.Helper()
	nstest.Eventually(t, func() error {
		got, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
		if err != nil || got == n {
			return nil
		}
		return fmt.Errorf("%d bytes are queued, want %d", got, n)
	})
}

func state(t testing.TB, fd int, s uint8) {
	t.Helper()
	nstest.Eventually(t, func() error {
		i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil && i.State == s {
			return nil
		}
		return fmt.Errorf("state %v, %v; want %d", i.State, err, s)
	})
}

func TestPositions(t *testing.T) {
	nstest.NeedRoot(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		peer, ours, fd := connection(t, address)
		peerFD := fdOf(t, peer)
		start, err := ReadPositions(peerFD) // of the connecting side: the SYN may count
		if err != nil {
			t.Fatal(err)
		}
		want(t, fd, 0, 0)
		peer.Write(make([]byte, 1000))
		queued(t, fd, 1000)
		want(t, fd, 0, 0)
		b := make([]byte, 100)
		unix.Recvfrom(fd, b, unix.MSG_PEEK)
		want(t, fd, 0, 0) // a peek does not read
		io.ReadFull(ours, b)
		want(t, fd, 100, 0)
		if err := Discard(fd, 300); err != nil {
			t.Error(err)
		}
		want(t, fd, 400, 0)
		ours.Write(make([]byte, 50))
		want(t, fd, 400, 50)
		queued(t, peerFD, 50)
		want(t, peerFD, start.Read, start.Written+1000)
		// A FIN is no byte, on either side.
		peer.CloseWrite()
		state(t, fd, unix.BPF_TCP_CLOSE_WAIT)
		want(t, fd, 400, 50)
		want(t, peerFD, start.Read, start.Written+1000)
		if err := Discard(fd, 601); err == nil {
			t.Error("more bytes were discarded than there were")
		}
		want(t, fd, 1000, 50)
		if n, err := ours.Read(b); err != io.EOF {
			t.Errorf("read %d, %v; want the end", n, err)
		}
		want(t, fd, 1000, 50)
		ours.Write(b[:7])
		ours.CloseWrite()
		if p, err := ReadPositions(fd); !errors.Is(err, ErrClosed) && (err != nil || p != (Positions{1000, 57})) {
			t.Errorf("after both ends have closed: %+v, %v", p, err)
		}
	}
}

// TestPositionsUnderLoad checks that positions are consistent under fast traffic.
func TestPositionsUnderLoad(t *testing.T) {
	nstest.NeedRoot(t)
	peer, ours, fd := connection(t, "127.0.0.1:0")
	go func() {
		b := make([]byte, 10000)
		for {
			if _, err := peer.Write(b[:1+rand.IntN(len(b))]); err != nil {
				return
			}
		}
	}()
	go io.Copy(io.Discard, peer)
	var read, written uint64
	b := make([]byte, 20000)
	for range 3000 {
		n, err := ours.Read(b[:1+rand.IntN(len(b))])
		if err != nil {
			t.Fatal(err)
		}
		read += uint64(n)
		if n, err = ours.Write(b[:rand.IntN(5000)]); err != nil {
			t.Fatal(err)
		}
		written += uint64(n)
		if p, err := ReadPositions(fd); err != nil || p != (Positions{read, written}) {
			t.Fatalf("positions %+v, %v; want %d and %d", p, err, read, written)
		}
	}
}

func TestCheck(t *testing.T) {
	nstest.NeedRoot(t)
	_, _, stream := connection(t, "127.0.0.1:0")
	socket := func(domain, kind, proto int) int {
		fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, proto)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	listener := socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
	if err := unix.Listen(listener, 1); err != nil {
		t.Fatal(err)
	}
	fds := map[string]int{"stream": stream, "listener": listener, "packet": socket(unix.AF_INET, unix.SOCK_DGRAM, 0),
		"unix": socket(unix.AF_UNIX, unix.SOCK_STREAM, 0), "raw": socket(unix.AF_INET, unix.SOCK_RAW, 89), "file": 0}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP); err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		fds["mptcp"] = fd
	}
	for name, fd := range fds {
		for k, fits := range map[wire.Kind]string{wire.Stream: "stream", wire.Listener: "listener", wire.Packet: "packet", 9: ""} {
			if err := Check(fd, k); (err == nil) != (name == fits) || err != nil && !errors.Is(err, wire.ErrBadSocket) {
				t.Errorf("%s as %s: %v", name, k, err)
			}
		}
	}
}

func BenchmarkPositions(b *testing.B) {
	nstest.NeedRoot(b)
	_, _, fd := connection(b, "127.0.0.1:0")
	for b.Loop() {
		ReadPositions(fd)
	}
}
