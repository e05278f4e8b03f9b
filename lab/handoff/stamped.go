// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stamped reads from a TCP connection, and says when the kernel has received the last of what it reads: how long the reader's
// own thread waits for a CPU is no gap of the stream's.
type stamped struct {
	raw syscall.RawConn
	oob [64]byte
}

func newStamped(c net.Conn) (*stamped, error) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("a %T has no timestamps", c)
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS_NEW, 1) })
	return &stamped{raw: raw}, errors.Join(cerr, err)
}

func (s *stamped) read(b []byte) (n int, at time.Time, err error) {
	var oobn int
	cerr := s.raw.Read(func(fd uintptr) bool {
		n, oobn, _, _, err = unix.Recvmsg(int(fd), b, s.oob[:], 0)
		return err != unix.EAGAIN
	})
	if err = errors.Join(cerr, err); err != nil {
		return 0, at, err
	}
	if n == 0 {
		return 0, at, io.EOF
	}
	at = time.Now()
	all, err := unix.ParseSocketControlMessage(s.oob[:oobn])
	for _, m := range all {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS_NEW && len(m.Data) == 16 {
			at = time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
		}
	}
	return n, at, err
}
