// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
)

// The kind of a connection, its first byte.
const (
	kindPing byte = 'p' // messages return, with the server's number in their first byte
	kindUp   byte = 'u' // bytes are counted; the count follows the end
	kindDown byte = 'd' // four bytes hold the ms of the server's sending; the last eight bytes count the preceding ones
)

const (
	message = 64      // bytes of a request, and of its answer
	block   = 1 << 18 // bytes of a write, and of a read
)

// server answers in a namespace. Its sockets block and have a thread each, to measure the path and not the
// poller.
type server struct {
	number byte
	fd     int
}

func startServer(e *lab.Env, ns *netns.Handle, number byte) (*server, error) {
	s := &server{number: number}
	err := ns.Do(func() (err error) {
		if s.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(s.fd, &unix.SockaddrInet4{Port: servicePort}); err != nil {
			return err
		}
		return unix.Listen(s.fd, 128)
	})
	if err != nil {
		return nil, err
	}
	e.OnClose(func() { _ = unix.Shutdown(s.fd, unix.SHUT_RDWR) }) // wakes accept
	go s.accept()
	return s, nil
}

func (s *server) accept() {
	defer unix.Close(s.fd)
	for {
		fd, _, err := unix.Accept4(s.fd, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
			continue
		}
		if err != nil {
			return
		}
		go s.serve(fd)
	}
}

// serve serves one connection. The client detects errors.
func (s *server) serve(fd int) {
	defer unix.Close(fd)
	if patient(fd) != nil {
		return
	}
	kind := make([]byte, 1)
	if readAll(fd, kind) != nil {
		return
	}
	switch kind[0] {
	case kindPing:
		b := make([]byte, message)
		for readAll(fd, b) == nil {
			b[0] = s.number
			if writeAll(fd, b) != nil {
				return
			}
		}
	case kindUp:
		_ = writeAll(fd, binary.BigEndian.AppendUint64(nil, drain(fd)))
	case kindDown:
		b := make([]byte, 4)
		if readAll(fd, b) != nil {
			return
		}
		sent := pour(fd, time.Duration(binary.BigEndian.Uint32(b))*time.Millisecond)
		_ = writeAll(fd, binary.BigEndian.AppendUint64(nil, sent))
	}
}

// pour writes for a while and returns the number of bytes.
func pour(fd int, d time.Duration) (sent uint64) {
	b := make([]byte, block)
	for end := time.Now().Add(d); time.Now().Before(end); sent += block {
		if writeAll(fd, b) != nil {
			return sent
		}
	}
	return sent
}

// drain reads to the end and returns the number of bytes.
func drain(fd int) (received uint64) {
	b := make([]byte, block)
	for {
		n, err := unix.Read(fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n <= 0 {
			return received
		}
		received += uint64(n)
	}
}

// patience is the timeout of sockets.
const patience = 30 * time.Second

// patient disables Nagle's algorithm on a socket and sets its timeouts.
func patient(fd int) error {
	tv := unix.NsecToTimeval(int64(patience))
	return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
}

var errEnded = errors.New("the other side has ended the connection")

func readAll(fd int, b []byte) error {
	for len(b) > 0 {
		switch n, err := unix.Read(fd, b); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return errEnded
		default:
			b = b[n:]
		}
	}
	return nil
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		switch n, err := unix.Write(fd, b); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		default:
			b = b[n:]
		}
	}
	return nil
}

// dial connects from the client, with a blocking socket.
func (w *world) dial(to netip.AddrPort) (fd int, err error) {
	err = w.client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, err
	}
	err = patient(fd)
	if err == nil {
		err = connect(fd, to)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// connect continues after a signal of Go's: a repeated call waits for the connection in progress.
func connect(fd int, to netip.AddrPort) error {
	for {
		err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
