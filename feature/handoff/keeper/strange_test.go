// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// TestLingeringDescriptorsOfStrangers sends descriptors with a slow close from connections without Hello: inside the
// queue of a Unix socket, and more than a message may contain. Others are served meanwhile, and the keeper keeps none
// of them.
func TestLingeringDescriptorsOfStrangers(t *testing.T) {
	_, socket := run(t, Options{Log: slog.New(slog.DiscardHandler)})
	open := reachable(t, socket)
	before := descriptors(t)
	fds := nstest.Lingering(t, 600)
	nstest.AsUser(t, 65534, func() error {
		for len(fds) > 0 {
			passed := fds[:6]
			if fds = fds[6:]; len(fds)%4 == 0 {
				nested, err := nest(passed)
				if err != nil {
					return err
				}
				passed = []int{nested}
			}
			if err := pass(t, open, passed); err != nil {
				return err
			}
		}
		return nil
	})
	hello(t, socket, "tele", "a").Close()
	nstest.Eventually(t, func() error {
		// The sockets' peers and the connections of root's members.
		if n := descriptors(t); n > before+600+8 {
			return fmt.Errorf("%d descriptors of a stranger's are open", n-before-600)
		}
		return nil
	})
}

// nest puts descriptors into the queue of a Unix socket.
func nest(fds []int) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fds...), nil, 0)
	unix.Close(pair[0])
	nstest.Drop(fds...)
	return pair[1], err
}

// pass sends a message with descriptors, and closes the connection.
func pass(t *testing.T, socket string, fds []int) error {
	c, err := wire.Dial(t.Context(), socket)
	if err != nil {
		return err
	}
	defer c.Close()
	b, err := (&wire.Message{Type: wire.Commit, Seq: 1, Session: 1}).Append(nil)
	if err != nil {
		return err
	}
	var sent error
	err = c.SyscallConn().Write(func(fd uintptr) bool {
		sent = unix.Sendmsg(int(fd), b, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		return sent != unix.EAGAIN
	})
	nstest.Drop(fds...)
	if errors.Is(sent, unix.EPIPE) || errors.Is(sent, unix.ECONNRESET) {
		sent = nil // rejected
	}
	return errors.Join(err, sent)
}
