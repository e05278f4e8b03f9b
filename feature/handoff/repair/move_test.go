// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// TestLinkLocalMoves moves a session between link-local addresses. It finds the interface by its name.
func TestLinkLocalMoves(t *testing.T) {
	w := nstest.NewWire(t)
	address := func(ns *netns.Handle, ip string) netip.Addr {
		a := netip.MustParseAddr(ip) // needs no duplicate address detection
		nstest.Address(t, ns, nstest.WireDevice, netip.PrefixFrom(a, 64))
		return a.WithZone(nstest.WireDevice)
	}
	local, remote := address(w.A, "fe80::a"), address(w.B, "fe80::b")
	var ln net.Listener
	ok(t, w.A.Do(func() (err error) {
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(false)
		ln, err = lc.Listen(t.Context(), "tcp6", "[::]:9000")
		return err
	}))
	defer ln.Close()
	var client net.Conn
	ok(t, w.B.Do(func() (err error) {
		client, err = net.DialTCP("tcp6", net.TCPAddrFromAddrPort(netip.AddrPortFrom(remote, 0)), net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 9000)))
		return err
	}))
	defer client.Close()
	server, err := ln.Accept()
	ok(t, err)
	// The session gets a new socket on the same server. No packet arrives in between.
	s, err := DumpConn(server.(*net.TCPConn), DumpOptions{})
	ok(t, err)
	ok(t, server.Close())
	if s.Zone != nstest.WireDevice {
		t.Errorf("zone %q", s.Zone)
	}
	s, err = Parse(marshal(t, s))
	ok(t, err)
	var c *Conn
	ok(t, w.A.Do(func() error {
		bare := *s
		if bare.Zone = ""; restores(&bare) {
			t.Error("a link-local address without an interface is restored")
		}
		if bare.Zone = "nowhere0"; restores(&bare) {
			t.Error("a link-local address on an interface that is not here is restored")
		}
		c, err = restore(s, RestoreOptions{})
		return err
	}))
	defer c.Close()
	chat(t, client.(*net.TCPConn), c)
}

func restores(s *State) bool {
	b, err := Build(s, RestoreOptions{})
	if err == nil {
		b.Close()
	}
	return err == nil
}

// TestMicrosecondTimestampsMove checks that a move keeps the unit of the timestamps, also microseconds.
func TestMicrosecondTimestampsMove(t *testing.T) {
	w := newWorld(t)
	const usec = 1 << 4 // RTAX_FEATURE_TCP_USEC_TS, linux/rtnetlink.h
	via := nstest.Side(1, 1)[0].Addr()
	err := w.Servers[0].Do(func() error {
		return netlink.RouteReplace(&netlink.Route{Gw: via.AsSlice(), Dst: nstest.Anywhere(via), Features: usec})
	})
	if errors.Is(err, unix.EINVAL) {
		t.Skip("need: kernel 6.7 (a route's feature tcp_usec_ts)")
	}
	ok(t, err)
	client, server := w.pair("tcp4", nil, nil)
	if !agreement(t, server).microseconds {
		t.Skip("need: kernel 6.7 (TCP timestamps in microseconds)")
	}
	chat(t, client, server)
	c := w.move(fresh{server})
	if !agreement(t, c.TCPConn).microseconds {
		t.Error("the clock has changed")
	}
	chat(t, client, c)
	c = w.move(c)
	chat(t, client, c)
	w.WantNoResets()
}

// TestUnread checks that every kind of read delivers the unread data first. Data still unread moves again.
func TestUnread(t *testing.T) {
	for name, read := range map[string]func(c *Conn) ([]byte, error){
		"Read": func(c *Conn) ([]byte, error) { return io.ReadAll(struct{ io.Reader }{c}) },
		"WriteTo": func(c *Conn) ([]byte, error) {
			var b bytes.Buffer
			_, err := c.WriteTo(&b)
			return b.Bytes(), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair("tcp4", nil, nil)
			offset := uint64(0)
			more := func(c *net.TCPConn, n int) {
				write(t, client, n, offset)
				offset += uint64(n)
				nstest.Until(t, "all has arrived", func() bool { return unread(t, c) == n })
			}
			more(server, 1000)
			c := w.move(fresh{server})
			if _, err := io.ReadFull(c, make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
			more(c.TCPConn, 500)
			c = w.move(c)
			if len(c.Unread()) != 1400 {
				t.Errorf("%d bytes unread after the second move, want 1400", len(c.Unread()))
			}
			more(c.TCPConn, 50)
			ok(t, client.CloseWrite())
			got, err := read(c)
			ok(t, err)
			if err := verify(got, 100); err != nil || len(got) != 1450 {
				t.Errorf("%d bytes: %v", len(got), err)
			}
		})
	}
}

// TestUrgentMoves moves an urgent byte inside the stream, at any position.
func TestUrgentMoves(t *testing.T) {
	for _, before := range []int{0, 1, 10} {
		for _, behind := range []int{0, 10} {
			w := newWorld(t)
			client, server := w.pair("tcp4", nil, func(fd int) error { return setInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1) })
			passes := false
			in(t, server, func(fd int) { passes = sock.PassesMarks(fd) })
			if !passes {
				t.Skip("need: kernel 6.9 (SO_PEEK_OFF for TCP)")
			}
			write(t, client, before, 0)
			urgent := make([]byte, 1)
			pattern(urgent, uint64(before))
			in(t, client, func(fd int) { ok(t, unix.Sendto(fd, urgent, unix.MSG_OOB, nil)) })
			write(t, client, behind, uint64(before+1))
			all := before + 1 + behind
			nstest.Until(t, "all has arrived", func() bool { return unread(t, server) == all })
			c := w.move(fresh{server})
			got := make([]byte, all)
			_, err := io.ReadFull(c, got)
			ok(t, err)
			ok(t, verify(got, 0))
			chat(t, client, c)
			w.WantNoResets()
		}
	}
}

// TestUnreadIsLimited checks that the limit includes data unread since an earlier move.
func TestUnreadIsLimited(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	write(t, client, 1000, 0)
	nstest.Until(t, "all has arrived", func() bool { return unread(t, server) == 1000 })
	c := w.move(fresh{server})
	for _, limit := range []int{1, 999} {
		if _, err := c.Dump(DumpOptions{Limit: limit}); err == nil {
			t.Errorf("1000 bytes pass a limit of %d", limit)
		}
	}
	if _, err := c.Dump(DumpOptions{Limit: 1000}); err != nil {
		t.Error(err)
	}
}

// BenchmarkMove measures dump, encoding and restore, with queues of the named size. This is the session's downtime
// without the network transfer.
func BenchmarkMove(b *testing.B) {
	for _, bc := range []struct {
		name   string
		buffer int
	}{{"64KiB", 32 << 10}, {"grown", 0}} { // Linux doubles SO_RCVBUF
		b.Run(bc.name, func(b *testing.B) {
			w := newWorld(b)
			var shape func(int) error
			if bc.buffer != 0 {
				shape = buffers(bc.buffer)
			}
			client, server := w.pair("tcp4", shape, shape)
			if bc.buffer == 0 {
				warm(b, client, server)
			}
			w.Hold() // keeps the servers' data unacknowledged, without interference
			_ = fill(b, server, func() bool { return true })
			w.bench(b, server)
		})
	}
}

func (w *world) bench(b *testing.B, server *net.TCPConn) {
	var d dumper = fresh{server}
	took := make([]time.Duration, 0, b.N)
	size := 0
	for b.Loop() {
		begin := time.Now()
		s, err := d.Dump(DumpOptions{})
		ok(b, err)
		ok(b, d.Close())
		wire, err := s.MarshalBinary()
		ok(b, err)
		took = append(took, time.Since(begin))
		size = len(wire)
		ok(b, w.Servers[0].Do(func() error { // exclude the time to enter the namespace
			begin := time.Now()
			s, err := Parse(wire)
			if err != nil {
				return err
			}
			c, err := restore(s, RestoreOptions{})
			took[len(took)-1] += time.Since(begin)
			d = c
			return err
		}))
	}
	slices.Sort(took)
	us := func(q int) float64 { return float64(took[(len(took)-1)*q/100].Nanoseconds()) / 1e3 }
	b.ReportMetric(us(50), "p50-µs")
	b.ReportMetric(us(99), "p99-µs")
	b.ReportMetric(float64(size), "state-bytes")
	_ = d.Close()
}
