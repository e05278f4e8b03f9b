// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// playPackets answers datagrams with its mark, if told to, until it is replaced: KEEPER ADDRESS
// MARK.
func playPackets(args []string) error {
	m, err := handoff.Join(context.Background(), handoff.Options{Service: "talk", Name: "0", Keeper: args[0], Timeout: patience})
	if err != nil {
		return err
	}
	p, err := m.ListenPacket(context.Background(), "udp", args[1])
	if err != nil {
		return err
	}
	if err := m.Ready(); err != nil {
		return err
	}
	fmt.Println("ready")
	if args[2] == "mute" {
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}
	b := make([]byte, 100)
	for {
		n, from, err := p.ReadFrom(b)
		if errors.Is(err, handoff.ErrReplaced) {
			return nil
		}
		if err != nil {
			return err
		}
		p.WriteTo(append([]byte(args[2]+":"), b[:n]...), from)
	}
}

// TestPackets checks that a UDP socket outlives its process with its unread datagrams, through a
// crash and a hot restart.
func TestPackets(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	start := func(mark string) *nstest.Process {
		return nstest.StartReady(t, nstest.Child("packets", w.socket, w.address, mark))
	}
	m := start("mute")
	c, err := net.Dial("udp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * patience))
	send := func(from, to int) {
		for i := from; i < to; i++ {
			fmt.Fprint(c, i)
		}
	}
	hear := func(mark string, from, to int) {
		t.Helper()
		b := make([]byte, 100)
		for i := from; i < to; i++ {
			n, err := c.Read(b)
			if want := fmt.Sprint(mark, ":", i); err != nil || string(b[:n]) != want {
				t.Fatalf("heard %q, %v; want %q", b[:n], err, want)
			}
		}
	}
	send(0, 50)
	m.Kill()
	send(50, 100)
	m = start("a")
	hear("a", 0, 100)
	next := start("b")
	if err := m.Wait(); err != nil {
		t.Errorf("the replaced process: %v", err)
	}
	send(100, 150)
	hear("b", 100, 150)
	next.Kill()
}

// TestQueuedConnections checks that the next process accepts connections queued while its
// predecessor dies.
func TestQueuedConnections(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	m := w.member("0", 0)
	stop(t, m) // it accepts no connection
	var clients []*client
	for range 20 {
		clients = append(clients, w.client())
	}
	m.Kill()
	for range 20 {
		clients = append(clients, w.client()) // without any process
	}
	w.member("0", 0)
	for _, c := range clients {
		c.run()
		c.hears(1)
		c.finish()
	}
}

// TestLeave checks an orderly end: the sessions wait for the next process as after a crash, but
// none counts as crashed.
func TestLeave(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	a := w.join("0")
	peer := dial(t, a.Addr())
	s, err := a.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(peer, "hello")
	b := make([]byte, 10)
	if n, err := s.Read(b); err != nil || n != 5 {
		t.Fatal(n, err)
	}
	if err := s.CommitExcept(3, []byte("state")); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.Read(b); err != handoff.ErrMoved {
		t.Errorf("after leaving: %v", err)
	}
	if _, err := a.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	next := w.join("0")
	s, err = next.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.Read(b); err != nil || string(b[:n]) != "llo" || string(s.State()) != "state" || s.Crashed() {
		t.Errorf("the next reads %q, %v; state %q, crashed %v", b[:n], err, s.State(), s.Crashed())
	}
	if n := w.counts(); n.Inherited < 1 || n.Rescued != 0 {
		t.Errorf("%+v", n)
	}
}

// TestStay checks that with Stay a replaced member keeps its sessions until it transfers them
// itself.
func TestStay(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	stay := func(o *handoff.Options) { o.Stay = true }
	a := w.join("0", stay)
	peer := dial(t, a.Addr())
	s, err := a.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	b := w.join("0", stay)
	<-a.Replaced()
	if _, err := a.Accept(); err != handoff.ErrReplaced {
		t.Errorf("Accept of the replaced member: %v", err)
	}
	if b.Addr().String() != a.Addr().String() {
		t.Errorf("the new one listens at %v, the old one did at %v", b.Addr(), a.Addr())
	}
	fmt.Fprint(peer, "hello")
	buf := make([]byte, 10)
	if n, err := s.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("the remaining session reads %q, %v", buf[:n], err)
	}
	if err := a.Transfer(s, "0", []byte("state")); err != nil {
		t.Fatal(err)
	}
	if s, err = b.AcceptSession(); err != nil || string(s.State()) != "state" {
		t.Errorf("%v", err)
	}
	dial(t, b.Addr())
	if s, err = b.AcceptSession(); err != nil || s.Received() {
		t.Errorf("a new connection: %v", err)
	}
}

// TestSend checks weir handoff send: the owner moves one session or all.
func TestSend(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	w.member("a", 0)
	w.memberAt(freeAddress(t), "b", 0)
	clients := []*client{w.client(), w.client(), w.client()}
	for _, c := range clients {
		c.run()
	}
	nstest.Until(t, "all are kept", func() bool { return len(w.sessions("session")) == 3 })
	of := func(name string) (ids []string) {
		for _, s := range w.sessions("session") {
			if s.Member == name {
				ids = append(ids, s.ID)
			}
		}
		return ids
	}
	var id uint64
	fmt.Sscan(of("a")[0], &id)
	if err := handoff.Send(t.Context(), w.socket, "talk", "", id, "b"); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "one has moved", func() bool { return len(of("b")) == 1 && len(of("a")) == 2 })
	if err := handoff.Send(t.Context(), w.socket, "talk", "a", 0, ""); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "all have moved", func() bool { return len(of("b")) == 3 })
	if err := handoff.Send(t.Context(), w.socket, "talk", "", 1, "b"); err == nil {
		t.Error("an unknown session was sent")
	}
	for _, c := range clients {
		c.finish()
	}
}
