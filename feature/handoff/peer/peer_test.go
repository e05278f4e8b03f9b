// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
)

// pair connects two agents.
func pair(t *testing.T, client, server *peer.Identity) (a, b *peer.Conn, errA, errB error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := l.Accept()
		if err != nil {
			errB = err
			return
		}
		b, errB = peer.Accept(t.Context(), raw, server, peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"})
	}()
	a, errA = peer.Dial(t.Context(), l.Addr().String(), "lb", client, peer.Hello{Number: 3, Instance: 9, Name: "host-a"})
	<-done
	t.Cleanup(func() {
		for _, c := range []*peer.Conn{a, b} {
			if c != nil {
				c.Close()
			}
		}
	})
	return a, b, errA, errB
}

func TestConn(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a, b, errA, errB := pair(t, ca.TLS("host-a"), ca.TLS("lb"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	if want := (peer.Hello{Number: 3, Instance: 9, Name: "host-a"}); b.Peer != want {
		t.Errorf("%+v", b.Peer)
	}
	if want := (peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"}); a.Peer != want {
		t.Errorf("%+v", a.Peer)
	}
	b.TakeSessions()
	frames := []peer.Frame{
		{Message: move.Message{Kind: move.Buffer, From: move.AtSource, To: move.AtLoadBalancer, Epoch: 1<<32 - 1, Backend: 1023},
			Flow: peer.Flow{Service: 63, Client: netip.MustParseAddrPort("192.0.2.1:65535")}},
		{Message: move.Message{Kind: move.Reclaimed, From: move.AtLoadBalancer, To: move.AtSource, Epoch: 5, Move: 4, OK: true},
			Flow: peer.Flow{Client: netip.MustParseAddrPort("[2001:db8::1]:1")}, Instance: 1<<64 - 1},
		{Message: move.Message{Kind: move.State, From: move.AtSource, To: move.AtDestination, Epoch: 2},
			Flow: peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:2")}, Session: bytes.Repeat([]byte("session "), 1<<19)},
	}
	go func() {
		for _, f := range frames {
			if err := a.Send(f); err != nil {
				t.Error(err)
			}
		}
		a.Close()
	}()
	for _, want := range frames {
		got, err := b.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if len(want.Session) == 0 {
			want.Session = []byte{}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got.Message, want.Message)
		}
	}
	if _, err := b.Receive(); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("after the end: %v", err)
	}
}

// TestStrangers checks that both sides reject a peer without a certificate of their CA.
func TestStrangers(t *testing.T) {
	ours, theirs := peertest.NewAuthority(t), peertest.NewAuthority(t)
	naked := ours.TLS("host-a")
	naked.Config().Certificates = nil
	for name, c := range map[string]struct{ client, server *peer.Identity }{
		"client of another signer": {theirs.TLS("host-a"), ours.TLS("lb")},
		"server of another signer": {ours.TLS("host-a"), theirs.TLS("lb")},
		"client without":           {naked, ours.TLS("lb")},
		"another name":             {ours.TLS("host-a"), ours.TLS("host-b")},
		"a name of another's":      {ours.TLS("host-b"), ours.TLS("lb")},
	} {
		a, b, errA, errB := pair(t, c.client, c.server)
		if errA == nil && errB == nil {
			t.Errorf("%s: %v and %v speak with each other", name, a.Peer, b.Peer)
		}
	}
}

func TestVersion(t *testing.T) {
	ca := peertest.NewAuthority(t)
	_, _, err, _ := pairRaw(t, ca, []byte{0, 0, 0, 15, 1, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0})
	if !errors.Is(err, peer.ErrFormat) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("%v", err)
	}
	_, _, err, _ = pairRaw(t, ca, []byte{0xff, 0xff, 0xff, 0xff, 1})
	if !errors.Is(err, peer.ErrFormat) {
		t.Errorf("%v", err)
	}
}

// pairRaw connects an agent to a server with the given bytes.
func pairRaw(t *testing.T, ca *peertest.Authority, says []byte) (a, b *peer.Conn, errA, errB error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", ca.TLS("lb").Config())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := c.Write(says); err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, c)
	}()
	a, errA = peer.Dial(t.Context(), l.Addr().String(), "lb", ca.TLS("host-a"), peer.Hello{Number: 3, Name: "host-a"})
	return a, nil, errA, nil
}

// TestSendToOneThatDoesNotRead checks that a peer without reads blocks its sender only briefly.
// Then the connection closes, and a pending Receive fails too.
func TestSendToOneThatDoesNotRead(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a, _, errA, errB := pair(t, ca.TLS("host-a"), ca.TLS("lb"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	heard := make(chan error, 1)
	go func() {
		_, err := a.Receive()
		heard <- err
	}()
	f := peer.Frame{Message: move.Message{Kind: move.State, To: move.AtDestination}, Session: make([]byte, 4<<20)}
	gaveUp := make(chan error, 1)
	go func() {
		for {
			start := time.Now()
			if err := a.Send(f); err != nil {
				if took := time.Since(start); took > 3*time.Second { // the kernel takes five
					t.Errorf("it gives up after %v", took)
				}
				gaveUp <- err
				return
			}
		}
	}()
	for _, c := range []chan error{gaveUp, heard} {
		select {
		case err := <-c:
			if err == nil {
				t.Error("no error")
			}
		case <-time.After(30 * time.Second):
			t.Fatal("it waits")
		}
	}
	start := time.Now()
	if err := a.Send(f); err == nil || time.Since(start) > 900*time.Millisecond {
		t.Errorf("the next after %v: %v", time.Since(start), err)
	}
}

// narrow is a path of 8 MiB per second.
type narrow struct{ net.Conn }

func (n narrow) Read(b []byte) (int, error) {
	c, err := n.Conn.Read(b[:min(len(b), 64<<10)])
	time.Sleep(time.Duration(c) * time.Second / (8 << 20))
	return c, err
}

// TestSendBySlowWay checks that a slow path is not treated as a blocked one. A large frame takes
// its time, and the other side does not count as silent.
func TestSendBySlowWay(t *testing.T) {
	ca := peertest.NewAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := peer.Frame{Message: move.Message{Kind: move.State, To: move.AtDestination}, Session: make([]byte, 24<<20)}
	came := make(chan error, 1)
	go func() {
		raw, err := l.Accept()
		if err == nil {
			_ = raw.(*net.TCPConn).SetReadBuffer(256 << 10)
			var c *peer.Conn
			if c, err = peer.Accept(t.Context(), narrow{raw}, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"}); err == nil {
				defer c.Close()
				c.TakeSessions()
				if got, e := c.Receive(); e != nil || len(got.Session) != len(f.Session) {
					err = errors.Join(e, fmt.Errorf("%d bytes came", len(got.Session)))
				}
			}
		}
		came <- err
	}()
	c, err := peer.Dial(t.Context(), l.Addr().String(), "lb", ca.TLS("host-a"), peer.Hello{Number: 3, Instance: 9, Name: "host-a"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	if err := c.Send(f); err != nil {
		t.Errorf("after %v: %v", time.Since(start), err)
		c.Close()
	}
	if err := <-came; err != nil {
		t.Error(err)
	}
}

// TestGoneTime checks that both ends give up on a dead host with unacknowledged data long before
// the kernel's default.
func TestGoneTime(t *testing.T) {
	ca := peertest.NewAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialled := make(chan *peer.Conn, 1)
	go func() {
		defer close(dialled)
		if c, err := peer.Dial(t.Context(), l.Addr().String(), "lb", ca.TLS("host-a"), peer.Hello{Number: 3, Instance: 9, Name: "host-a"}); err == nil {
			dialled <- c
		}
	}()
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := peer.Accept(t.Context(), raw, ca.TLS("lb"), peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"})
	if err != nil {
		t.Fatal(err)
	}
	for side, c := range map[string]*peer.Conn{"who accepts": accepted, "who dials": <-dialled} {
		defer c.Close()
		s, err := peer.Raw(c).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		ms := 0
		if cerr := s.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) }); cerr != nil || err != nil || ms == 0 || ms > 10_000 {
			t.Errorf("%s: %d ms, %v, %v", side, ms, err, cerr)
		}
	}
}

// TestDialAny checks that one handshake finds an agent with one of several names. It rejects other
// names, other CAs, expired certificates, and certificates for clients alone.
func TestDialAny(t *testing.T) {
	ca := peertest.NewAuthority(t)
	for what, c := range map[string]struct {
		server *peer.Identity
		name   string
		refuse string // part of the error
	}{
		"first":      {ca.TLS("lb-a"), "lb-a", ""},
		"second":     {ca.TLS("lb-b"), "lb-b", ""},
		"third":      {ca.TLS("lb-c"), "lb-c", "not lb-b"},
		"another CA": {peertest.NewAuthority(t).TLS("lb-b"), "lb-b", "unknown authority"},
		"expired":    {ca.ExpiredTLS("lb-b"), "lb-b", "expired"},
		"clients":    {ca.ClientTLS("lb-b"), "lb-b", "incompatible key usage"},
		"other word": {ca.TLS("lb-b"), "lb-c", "it calls itself"},
	} {
		t.Run(what, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			heard := make(chan error, 1)
			go func() {
				raw, err := l.Accept()
				if err == nil {
					var b *peer.Conn
					if b, err = peer.Accept(t.Context(), raw, c.server, peer.Hello{Role: peer.LBAgent, Instance: 7, Name: c.name}); err == nil {
						defer b.Close()
					}
				}
				heard <- err
			}()
			a, err := peer.DialAny(t.Context(), l.Addr().String(), []string{"lb-a", "lb-b"}, ca.TLS("host-a"), peer.Hello{Number: 3, Instance: 9, Name: "host-a"})
			if err == nil {
				defer a.Close()
			}
			if c.refuse != "" {
				if err == nil || !strings.Contains(err.Error(), c.refuse) {
					t.Errorf("%v: want %q", err, c.refuse)
				}
				return
			}
			if herr := <-heard; err != nil || herr != nil {
				t.Errorf("%v; the agent there: %v", err, herr)
			} else if a.Peer.Name != c.name {
				t.Errorf("%+v", a.Peer)
			}
		})
	}
}
