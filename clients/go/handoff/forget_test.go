// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// refuses waits until an address refuses connections.
func refuses(t *testing.T, address string) {
	t.Helper()
	nstest.Until(t, address+" refuses connections", func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}

// TestForget checks that a member stopped for good leaves no port with hanging connections, by
// itself or by a command.
func TestForget(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	c := dial(t, l.Addr())
	if _, err := l.AcceptSession(); err != nil {
		t.Fatal(err)
	}
	if err := l.Forget(); err != nil {
		t.Error(err)
	}
	refuses(t, l.Addr().String())
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes", n)
	}
	nstest.Until(t, "the keeper keeps nothing", func() bool { return len(w.sessions("listener"))+len(w.sessions("session")) == 0 })

	m := w.member("0", 0)
	stream := w.client()
	nstest.Until(t, "it is kept", func() bool { return len(w.sessions("session")) == 1 })
	forget := func(member string, id uint64) (int, error) {
		return handoff.Forget(t.Context(), w.socket, "talk", member, id, false)
	}
	if _, err := forget("0", 0); !errors.Is(err, wire.ErrOwned) {
		t.Errorf("a living member: %v", err)
	}
	if _, err := forget("0", w.number()); !errors.Is(err, wire.ErrOwned) {
		t.Errorf("its session: %v", err)
	}
	m.Kill()
	if _, err := forget("1", 0); !errors.Is(err, wire.ErrNotFound) {
		t.Errorf("an unknown member: %v", err)
	}
	if n, err := forget("0", 0); err != nil || n != 2 {
		t.Errorf("%d, %v", n, err)
	}
	refuses(t, w.address)
	if _, err := stream.conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the session: %v", err)
	}
}

// TestForeignForget checks that members in C and Python stopped for good free their port at once.
func TestForeignForget(t *testing.T) {
	for language, command := range probes(t) {
		t.Run(language, func(t *testing.T) {
			w := newWorld(t, keeper.Options{})
			p := w.probe("0", w.address, command...)
			c := w.connect(p)
			p.want("forget 0", "0")
			refuses(t, w.address)
			nstest.Until(t, "the keeper keeps nothing", func() bool { return len(w.sessions("listener"))+len(w.sessions("session")) == 0 })
			p.Kill()
			if n, err := c.Read(make([]byte, 1)); err == nil {
				t.Errorf("read %d bytes", n)
			}
		})
	}
}

// TestAddressChange changes the address of a name. If the old and new addresses overlap, the old
// listener must be released first. Sessions continue in both cases.
func TestAddressChange(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	old := w.member("0", 0)
	c := w.client()
	c.run()
	nstest.Until(t, "it is kept", func() bool { return len(w.sessions("session")) == 1 })
	_, port, err := net.SplitHostPort(w.address)
	if err != nil {
		t.Fatal(err)
	}
	_, err = handoff.Listen(t.Context(), "tcp4", "0.0.0.0:"+port, handoff.Options{Service: "talk", Name: "0", Keeper: w.socket})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "weir handoff forget --listeners") {
		t.Errorf("an overlapping address: %v", err)
	}
	if n := w.counts(); n.Transfers != 0 {
		t.Errorf("%+v", n)
	}
	// Another address: the new process has the session. The old address waits to be forgotten.
	other := freeAddress(t)
	next := w.memberAt(other, "0", 0)
	old.Expect("stopped: true")
	old.Kill()
	nstest.Until(t, "the old address waits", func() bool {
		for _, s := range w.sessions("listener") {
			if s.PID == 0 && s.Local == w.address {
				return true
			}
		}
		return false
	})
	if n, err := handoff.Forget(t.Context(), w.socket, "talk", "0", 0, true); err != nil || n != 1 {
		t.Errorf("%d, %v", n, err)
	}
	refuses(t, w.address)
	// Back to an overlapping one: the process ends, its session waits, and its address is free.
	next.Kill()
	nstest.Until(t, "the listener is let go of", func() bool {
		n, err := handoff.Forget(t.Context(), w.socket, "talk", "0", 0, true)
		return err == nil && n == 1
	})
	_, port, err = net.SplitHostPort(other)
	if err != nil {
		t.Fatal(err)
	}
	w.memberAt("0.0.0.0:"+port, "0", 0)
	c.finish()
	if n := w.counts(); n.Transfers != 1 || n.Rescued == 0 || n.Gaps+n.Expired > 0 {
		t.Errorf("%+v", n)
	}
}
