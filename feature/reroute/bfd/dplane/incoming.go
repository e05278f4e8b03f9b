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

// incoming is what comes by a stream socket, looked at before it is taken.
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

// control calls f with the descriptor, which is not to be kept.
func (in *incoming) control(f func(fd int) error) error {
	var err error
	return errors.Join(in.raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// How long the rest of a message may be missing, and between two looks: what is there already does not wake who waits for more.
const (
	restLimit = 10 * time.Second
	restNap   = 5 * time.Millisecond
)

// next waits for a message, and says how long it is in the socket, where it stays.
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
			return m, 0, fmt.Errorf("%w: the rest of a message has not come in %v", errProtocol, restLimit)
		}
	}
}

// consume takes so many bytes, which next has seen, from the socket.
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

// receive waits until something is there; io.EOF: nothing will be.
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
