// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/repair/ktlstest"
	"github.com/weir-project/weir/internal/nstest"
)

// refusedBusy expects a rejected dump, and an unchanged socket.
func (w *world) refusedBusy(s *secured, why string) {
	w.t.Helper()
	stopped, released := 0, 0
	o := DumpOptions{Quiet: 5 * time.Millisecond, Stop: func(Flow) (func(), error) { stopped++; return func() { released++ }, nil }}
	state, err := DumpConn(s.server, o)
	if !errors.Is(err, errTLSBusy) || !strings.Contains(err.Error(), why) {
		w.t.Errorf("dump: %v, %v; want %q", state, err, why)
	}
	if stopped != released {
		w.t.Errorf("stopped %d times, released %d times", stopped, released)
	}
	in(w.t, s.server, func(fd int) {
		if frozen, err := Frozen(fd); frozen || err != nil {
			w.t.Errorf("the socket is frozen: %v, %v", frozen, err)
		}
	})
}

// TestTLSBusy checks that data in flight prevents a move. The session continues unharmed, and moves afterwards.
func TestTLSBusy(t *testing.T) {
	needKTLS(t)
	for _, tc := range []struct {
		name, why string
		begin     func(t *testing.T, w *world, s *secured) // causes the rejection
		end       func(t *testing.T, w *world, s *secured)
	}{
		{"half a record", "unread bytes", func(t *testing.T, w *world, s *secured) {
			s.wire.stopAfter(700)
			s.request(t, 1000)
			nstest.Until(t, "half of it is there", func() bool { return unread(t, s.server) == 700 })
		}, func(t *testing.T, w *world, s *secured) { ok(t, s.wire.open()) }},
		{"a part of its header", "unread bytes", func(t *testing.T, w *world, s *secured) {
			s.wire.stopAfter(3)
			s.request(t, 1000)
			nstest.Until(t, "it is there", func() bool { return unread(t, s.server) == 3 })
		}, func(t *testing.T, w *world, s *secured) { ok(t, s.wire.open()) }},
		{"a record", "unread bytes", func(t *testing.T, w *world, s *secured) {
			s.request(t, 1000)
			nstest.Until(t, "it is there", func() bool { return unread(t, s.server) > 1000 })
		}, nil},
		{"a record of which a part was read", "unread", func(t *testing.T, w *world, s *secured) {
			s.request(t, 1000)
			b := make([]byte, 1)
			_, err := s.server.Read(b)
			ok(t, err)
			ok(t, verify(b, s.sent[0]))
			s.sent[0]++
			if n := unread(t, s.server); n != 0 {
				t.Errorf("%d bytes are in the queue: the test is for what is not", n)
			}
		}, nil},
		{"nothing is acknowledged", "unacknowledged", func(t *testing.T, w *world, s *secured) {
			w.acknowledged(fresh{s.server})
			w.Hold() // blocks acknowledgements
			s.answer(t, 1000)
		}, func(t *testing.T, w *world, s *secured) { w.Route(w.Owner); w.Release() }},
		{"a segment is missing", "out of order", func(t *testing.T, w *world, s *secured) {
			w.deafen(true) // the client would otherwise learn of the gap, and fill it
			w.Hold()
			s.request(t, 500)
			s.request(t, 500)
			w.loseFirst(2)
			nstest.Until(t, "the others are there", func() (there bool) {
				in(t, s.server, func(fd int) {
					var mem [9]uint32
					ok(t, get(fd, unix.SOL_SOCKET, unix.SO_MEMINFO, &mem))
					there = mem[memReceive] > 0
				})
				return there
			})
			w.Hold() // blocks retransmissions
			if n := unread(t, s.server); n != 0 {
				t.Errorf("%d bytes are in the queue: the test is for what is not", n)
			}
		}, func(t *testing.T, w *world, s *secured) { w.deafen(false); w.Route(w.Owner); w.Release() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.secure("tcp4", ktlstest.Suites[0], both)
			s.exchange(t, s.server, 100)
			w.acknowledged(fresh{s.server})
			before := s.sent
			tc.begin(t, w, s)
			w.refusedBusy(s, tc.why)
			if tc.end != nil {
				tc.end(t, w, s)
			}
			s.rest(t, before)
			s.exchange(t, s.server, 10000)
			w.acknowledged(fresh{s.server})
			c := w.move(fresh{s.server})
			s.exchange(t, c, 10000)
			w.WantNoResets()
		})
	}
}

// loseFirst drops the first of n held packets with data, and releases the others.
func (w *world) loseFirst(n int) {
	w.t.Helper()
	var held [][]byte
	nstest.Until(w.t, "the packets are held", func() bool {
		p := make([]byte, 2048)
		if m, err := unix.Read(int(w.Held.Fd()), p); err == nil && m > 100 { // not a pure acknowledgement
			held = append(held, p[:m])
		}
		return len(held) == n
	})
	w.Route(w.Owner)
	for _, p := range held[1:] {
		_, err := unix.Write(int(w.Held.Fd()), p)
		ok(w.t, err)
	}
}

// deafen blocks packets to the client.
func (w *world) deafen(on bool) {
	w.t.Helper()
	hole := &netlink.Route{Dst: &net.IPNet{IP: nstest.Side(0, 2)[0].Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_BLACKHOLE}
	w.do(w.Router, func() error {
		if on {
			return netlink.RouteAdd(hole)
		}
		return netlink.RouteDel(hole)
	})
}

// request and answer write data that nobody reads yet.
func (s *secured) request(t *testing.T, n int) { s.write(t, 0, n) }
func (s *secured) answer(t *testing.T, n int)  { s.write(t, 1, n) }

func (s *secured) write(t *testing.T, way, n int) {
	t.Helper()
	b := make([]byte, n)
	pattern(b, s.sent[way]+uint64(s.left[way]))
	var err error
	if way == 0 {
		_, err = s.client.Write(b)
	} else {
		_, err = s.server.Write(b)
	}
	ok(t, err)
	s.left[way] += n
}

// rest reads the data that a test has written since the positions.
func (s *secured) rest(t *testing.T, before [2]uint64) {
	t.Helper()
	for way, n := range s.left {
		if n == 0 {
			continue
		}
		n -= int(s.sent[way] - before[way]) // already read by the test
		b := make([]byte, max(n, 0))
		to := []interface {
			Read([]byte) (int, error)
			SetReadDeadline(time.Time) error
		}{s.server, s.client}[way]
		ok(t, to.SetReadDeadline(time.Now().Add(patience)))
		for have := 0; have < len(b); {
			m, err := to.Read(b[have:])
			ok(t, err)
			have += m
		}
		ok(t, verify(b, s.sent[way]))
		s.sent[way] += uint64(len(b))
		s.left[way] = 0
	}
}

// TestTLSSettles checks that a waiting dump succeeds as soon as the awaited data has arrived.
func TestTLSSettles(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], both)
	s.exchange(t, s.server, 100)
	w.acknowledged(fresh{s.server})
	w.Hold()
	before := s.sent
	s.answer(t, 1000)
	go func() { time.Sleep(50 * time.Millisecond); w.Route(w.Owner); w.Release() }()
	in(t, s.server, func(fd int) { ok(t, Quiesce(fd, DumpOptions{Quiet: patience})) })
	c := w.move(fresh{s.server})
	s.rest(t, before)
	s.exchange(t, c, 10000)
	w.WantNoResets()
}

// TestTLSRecordThatIsBegun checks that a record waiting for more data is sent before the move. The kernel's queue
// lengths do not include it.
func TestTLSRecordThatIsBegun(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], both)
	s.exchange(t, s.server, 100)
	w.acknowledged(fresh{s.server})
	b := make([]byte, 500)
	pattern(b, s.sent[1])
	in(t, s.server, func(fd int) {
		ok(t, unix.Sendto(fd, b, unix.MSG_MORE|unix.MSG_DONTWAIT, nil))
		if l, err := queueLengths(fd); err != nil || l.unacked != 0 {
			t.Errorf("%+v, %v: the test is for what no queue has", l, err)
		}
		ok(t, Quiesce(fd, DumpOptions{Quiet: patience}))
	})
	c := w.move(fresh{s.server})
	before := s.sent
	s.left[1] = len(b)
	s.rest(t, before)
	s.exchange(t, c, 10000)
	w.WantNoResets()
}

// TestTLSSmallBuffer keeps sessions with small receive buffers in place, because the kernel hides their partial
// records.
func TestTLSSmallBuffer(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], both)
	in(t, s.server, func(fd int) { ok(t, setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 2000)) })
	s.exchange(t, s.server, 10000) // the window shrinks with use
	w.acknowledged(fresh{s.server})
	before := s.sent
	s.wire.stopAfter(1400)
	s.request(t, 2000)
	nstest.Until(t, "a part is there", func() (some bool) {
		in(t, s.server, func(fd int) {
			i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			some = err == nil && i.Bytes_received > before[0]+1400
		})
		return some
	})
	t.Logf("of 1400 bytes of a record %d are to be seen", unread(t, s.server))
	if _, err := DumpConn(s.server, DumpOptions{}); err == nil || unread(t, s.server) == 0 && !errors.Is(err, errTLS) {
		t.Errorf("dump: %v", err)
	}
	ok(t, s.wire.open())
	s.rest(t, before)
	s.exchange(t, s.server, 1000)
}

// TestTLSRestoreFails checks that a failed restore leaves no socket behind, the state stays usable, and no output
// contains keys.
func TestTLSRestoreFails(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], both)
	s.exchange(t, s.server, 100)
	w.acknowledged(fresh{s.server})
	state := w.dump(fresh{s.server})
	w.Own(1 - w.Owner)
	here := w.Servers[w.Owner]
	free := w.sockets(here)
	edited := func(f func(*TLS)) *State {
		c, k := *state, *state.TLS
		f(&k)
		c.TLS = &k
		return &c
	}
	for _, tc := range []struct {
		name  string
		state *State
		want  error
	}{
		{"a cipher that is unknown", edited(func(k *TLS) { k.Cipher = 99 }), errInvalid},
		{"a cipher that does not go with the version", edited(func(k *TLS) { // ARIA exists only for TLS 1.2, and in few kernels
			k.Version, k.Cipher = tlsVersion13, 57
			k.Tx, k.Rx = make(Keys, 36), make(Keys, 36)
		}), errNoTLS},
		{"keys that are too short", edited(func(k *TLS) { k.Tx = k.Tx[1:] }), errInvalid},
		{"a version that is unknown", edited(func(k *TLS) { k.Version = 0x0305 }), errInvalid},
	} {
		w.do(here, func() error {
			c, err := restore(tc.state, RestoreOptions{})
			if err == nil {
				c.Close()
			}
			if !errors.Is(err, tc.want) {
				t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
			}
			return nil
		})
	}
	if n := w.sockets(here); n != free {
		t.Errorf("%d sockets of TCP, before %d", n, free)
	}
	w.do(here, func() error { // built and discarded silently
		b, err := Build(state, RestoreOptions{})
		if err == nil {
			err = b.Close()
		}
		return err
	})
	c := w.restoreHere(state)
	s.exchange(t, c, 10000)
	w.WantNoResets()
}

// TestTLSWrongNumber checks that a wrong record number ends the session. It proves that the tests above detect wrong
// numbers.
func TestTLSWrongNumber(t *testing.T) {
	needKTLS(t)
	w := newWorld(t)
	s := w.secure("tcp4", ktlstest.Suites[0], both)
	s.exchange(t, s.server, 100)
	w.acknowledged(fresh{s.server})
	c := w.moveState(fresh{s.server}, func(state *State) { state.TLS.Tx[len(state.TLS.Tx)-1]++ })
	_, err := c.Write([]byte("x"))
	ok(t, err)
	_ = s.client.SetReadDeadline(time.Now().Add(patience))
	if n, err := s.client.Read(make([]byte, 10)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the client reads %d bytes, %v", n, err)
	}
}

// TestTLSWithoutKernel checks that a kernel without kTLS rejects the state, and keeps nothing.
func TestTLSWithoutKernel(t *testing.T) {
	if err := probeTLS(); !errors.Is(err, unix.ENOENT) {
		t.Skip("need: kernel without kTLS")
	}
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	chat(t, client, server)
	w.acknowledged(fresh{server})
	state := w.dump(fresh{server})
	w.Own(1 - w.Owner)
	free := w.sockets(w.Servers[w.Owner])
	with := *state
	with.TLS = exampleTLS().TLS
	w.do(w.Servers[w.Owner], func() error {
		if _, err := restore(&with, RestoreOptions{}); !errors.Is(err, errNoTLS) {
			t.Errorf("restored: %v, want %v", err, errNoTLS)
		}
		return nil
	})
	if n := w.sockets(w.Servers[w.Owner]); n != free {
		t.Errorf("%d sockets of TCP, before %d", n, free)
	}
	chat(t, client, w.restoreHere(state))
	w.WantNoResets()
}

// restoreHere restores at the server with the addresses.
func (w *world) restoreHere(s *State) (c *Conn) {
	w.t.Helper()
	w.do(w.Servers[w.Owner], func() (err error) { c, err = restore(s, RestoreOptions{}); return err })
	w.t.Cleanup(func() { c.Close() })
	w.Route(w.Owner)
	w.Release()
	return c
}

// tlsStat returns a counter of the calling thread's network namespace.
func tlsStat(name string) (n int, err error) {
	b, err := os.ReadFile("/proc/thread-self/net/tls_stat")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, found := strings.CutPrefix(line, name); found {
			_, err = fmt.Sscan(rest, &n)
			return n, err
		}
	}
	return 0, fmt.Errorf("%s is not in tls_stat", name)
}
