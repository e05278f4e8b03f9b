// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// incoming reads messages from a stream socket without consuming them at first.
type incoming struct {
	raw    syscall.RawConn
	buffer [maxLength]byte
}

func (in *incoming) of(socket any) (err error) {
	c, ok := socket.(syscall.Conn)
	if !ok {
		return errors.New("the connection is no socket")
	}
	in.raw, err = c.SyscallConn()
	return err
}

// control calls f with the descriptor. f must not keep it.
func (in *incoming) control(f func(fd int) error) error {
	var err error
	return errors.Join(in.raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// Time for the rest of a message, and the pause between two reads. Polling is needed, because data already present
// does not wake a reader waiting for more.
const (
	restLimit = 10 * time.Second
	restNap   = 5 * time.Millisecond
)

// next waits for a message and returns it with its length. The message stays in the socket.
func (in *incoming) next() (m message, length int, err error) {
	for end := time.Now().Add(restLimit); ; time.Sleep(restNap) {
		n, err := in.receive(in.buffer[:], unix.MSG_PEEK)
		if err != nil {
			return m, 0, err
		}
		m, err := read(bytes.NewReader(in.buffer[:n]))
		if err == nil {
			return m, headLength + len(m.body), nil
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
			return m, 0, err
		}
		if time.Now().After(end) {
			return m, 0, fmt.Errorf("%w: the rest of a message is missing after %v", errProtocol, restLimit)
		}
	}
}

// consume removes length bytes, seen by next, from the socket.
func (in *incoming) consume(length int) error {
	for length > 0 {
		n, err := in.receive(in.buffer[:length], 0)
		if err != nil {
			return err
		}
		length -= n
	}
	return nil
}

// receive waits for data. It returns io.EOF at the end of the stream.
func (in *incoming) receive(b []byte, flags int) (n int, err error) {
	cerr := in.raw.Read(func(fd uintptr) bool {
		for {
			n, _, err = unix.Recvfrom(int(fd), b, flags|unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	if err = errors.Join(cerr, err); err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}
