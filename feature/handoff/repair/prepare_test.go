// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"errors"
	"net"
	"reflect"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// TestPrepare compares dumps with and without an early Prepare. Both contain the data received since, and the grown
// buffers.
func TestPrepare(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	var p *Prepared
	with(t, server, func(fd int) (err error) {
		p, err = Prepare(fd, DumpOptions{})
		return err
	})
	before := p.state
	go func() { _, _ = client.Write(make([]byte, 600_000)) }() // exceeds the buffers: Write returns when the connection ends
	nstest.Until(t, "much has arrived", func() bool { return unread(t, server) > 100_000 })
	w.Hold()
	var early, late *State
	with(t, server, func(fd int) (err error) {
		for _, one := range []struct {
			to   **State
			dump func(int, DumpOptions) (*State, error)
		}{{&early, p.Dump}, {&late, Dump}} {
			if *one.to, err = one.dump(fd, DumpOptions{}); err != nil {
				return err
			}
			if err := Resume(fd, *one.to); err != nil {
				return err
			}
		}
		return nil
	})
	w.Release()
	if len(early.Unread) <= 100_000 {
		t.Errorf("%d bytes unread", len(early.Unread))
	}
	if early.RcvBuf == 0 || early.SndBuf == 0 || before.RcvBuf != 0 {
		t.Errorf("buffers of %d and %d bytes, and of %d when it was prepared", early.RcvBuf, early.SndBuf, before.RcvBuf)
	}
	if !bytes.Equal(early.Unread, late.Unread) {
		t.Errorf("%d bytes unread, and other than the %d", len(early.Unread), len(late.Unread))
	}
	for _, s := range []*State{early, late} { // these fields change without the application: the session sends between the two dumps
		s.Timestamp, s.Window, s.Unread = 0, Window{}, nil
	}
	if !reflect.DeepEqual(early, late) {
		t.Errorf("prepared:\n%+v\nat once:\n%+v", early, late)
	}
}

// TestPrepareRefuses checks that Prepare rejects immovable sessions, and Dump rejects a session that grows too large
// later.
func TestPrepareRefuses(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	write(t, client, 1000, 0)
	nstest.Until(t, "all has arrived", func() bool { return unread(t, server) == 1000 })
	with(t, server, func(fd int) error {
		if _, err := Prepare(fd, DumpOptions{Limit: 999}); !errors.Is(err, errTooLarge) {
			t.Errorf("1000 bytes: %v", err)
		}
		o := DumpOptions{Limit: 1500}
		p, err := Prepare(fd, o)
		if err != nil {
			return err
		}
		write(t, client, 1000, 1000)
		nstest.Until(t, "more has arrived", func() bool { return unread(t, server) == 2000 })
		if _, err := p.Dump(fd, o); !errors.Is(err, errTooLarge) {
			t.Errorf("2000 bytes: %v", err)
		}
		frozen, err := Frozen(fd)
		if frozen {
			t.Error("a refused dump leaves the session frozen")
		}
		return err
	})
}

func with(t *testing.T, c *net.TCPConn, f func(fd int) error) {
	t.Helper()
	var err error
	ok(t, control(c, func(fd int) { err = f(fd) }))
	ok(t, err)
}
