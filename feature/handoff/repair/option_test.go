// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// unusual has a non-default value for each option, as returned by getsockopt. The exception is SO_DONTROUTE: it would
// cut the route to the client.
var unusual = map[string]int{"IP_TRANSPARENT": 1, "IP_FREEBIND": 1, "IPV6_TRANSPARENT": 1, "IPV6_FREEBIND": 1, "SO_MARK": 77, "SO_DONTROUTE": 0,
	"IP_TOS": 0xb8, "IPV6_TCLASS": 0x48, "SO_PRIORITY": 5, "IP_TTL": 33, "IP_MINTTL": 3, "IP_MTU_DISCOVER": unix.IP_PMTUDISC_DO,
	"IPV6_UNICAST_HOPS": 44, "IPV6_MINHOPCOUNT": 4, "IPV6_MTU_DISCOVER": unix.IPV6_PMTUDISC_DO, "TCP_CORK": 1, "TCP_NODELAY": 0, "TCP_KEEPIDLE": 91,
	"TCP_KEEPINTVL": 17, "TCP_KEEPCNT": 5, "SO_KEEPALIVE": 1, "TCP_USER_TIMEOUT": 54321, "TCP_LINGER2": 13, "TCP_NOTSENT_LOWAT": 77777,
	"TCP_THIN_LINEAR_TIMEOUTS": 1, "TCP_INQ": 1, "TCP_RTO_MAX_MS": 5000, "SO_OOBINLINE": 1, "SO_RCVLOWAT": 3, "SO_MAX_PACING_RATE": 1 << 27,
	"SO_ZEROCOPY": 1, "IPV6_V6ONLY": 0}

// makeUnusual sets every option to its unusual value, and returns the values of the socket's options.
func makeUnusual(t *testing.T, fd int, s *State) map[string]int {
	set := map[string]int{}
	for i := range options {
		o := &options[i]
		v, ok := unusual[o.name]
		if !ok {
			t.Fatalf("the test has no value for %s", o.name)
		}
		if !o.applies(s) {
			continue
		}
		if o.name == "IPV6_V6ONLY" { // read-only on a connected socket
			v, _ = unix.GetsockoptInt(fd, o.level, o.opt)
		} else if err := setInt(fd, o.level, o.opt, v); absent(err) {
			t.Logf("this kernel has no %s", o.name)
			continue
		} else if err != nil {
			t.Fatalf("set %s to %d: %v", o.name, v, err)
		}
		set[o.name] = v
	}
	return set
}

func optionValues(t *testing.T, fd int, s *State) map[string]int {
	got := map[string]int{}
	for i := range options {
		o := &options[i]
		if !o.applies(s) {
			continue
		}
		v, err := unix.GetsockoptInt(fd, o.level, o.opt)
		if absent(err) {
			continue
		} else if err != nil {
			t.Fatalf("%s: %v", o.name, err)
		}
		got[o.name] = v
	}
	return got
}

// in runs f with a connection's descriptor.
func in(t testing.TB, c *net.TCPConn, f func(fd int)) {
	t.Helper()
	if err := control(c, f); err != nil {
		t.Fatal(err)
	}
}

// TestOptionsMove checks that a move keeps every socket option.
func TestOptionsMove(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp6", "tcp"} {
		t.Run(network, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair(network, nil, nil)
			s, before := &State{}, map[string]int{}
			in(t, server, func(fd int) {
				if err := s.readAddresses(fd); err != nil {
					t.Fatal(err)
				}
				set := makeUnusual(t, fd, s)
				if before = optionValues(t, fd, s); !reflect.DeepEqual(before, set) {
					t.Fatalf("the options do not take:\n%v\n%v", before, set)
				}
				for what, err := range map[string]error{"congestion": unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno"),
					"linger":    unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 9}),
					"reuseaddr": setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
					"buffer":    setInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 50000), "device": unix.BindToDevice(fd, "eth0")} {
					if err != nil {
						t.Fatalf("%s: %v", what, err)
					}
				}
			})
			var state *State
			c := w.moveState(fresh{server}, func(s *State) { state = s })
			in(t, c.TCPConn, func(fd int) {
				if after := optionValues(t, fd, s); !reflect.DeepEqual(before, after) {
					t.Errorf("options after the move:\n%v\nbefore:\n%v", after, before)
				}
			})
			if len(c.Lost) != 0 && hasBufLock() { // without it a buffer keeps its size, and Lost has an entry
				t.Errorf("lost: %q", c.Lost)
			}
			in(t, c.TCPConn, func(fd int) { setInt(fd, unix.IPPROTO_TCP, unix.TCP_CORK, 0) })
			in(t, c.TCPConn, func(fd int) { setInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1) })
			in(t, c.TCPConn, func(fd int) { setInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, -1) })
			chat(t, client, c)
			if state.Congestion != "reno" || state.Linger != 9 || !state.ReuseAddr || state.SndBufLocked != hasBufLock() || state.SndBuf != 100000 || state.Device != "eth0" {
				t.Errorf("the state lacks something: %+v", state)
			}
			again := w.dump(c) // a dump after the move must equal the one before, apart from the cleared fields
			for _, s := range []*State{state, again} {
				s.Timestamp, s.Window, s.SndUna, s.RcvNxt, s.Send, s.Unread, s.Options = 0, Window{}, 0, 0, nil, nil, nil
				s.RcvBuf = 0 // it grows automatically, because it is not locked
			}
			if !reflect.DeepEqual(state, again) {
				t.Errorf("first dump  %+v\nsecond dump %+v", state, again)
			}
		})
	}
}

func hasBufLock() bool { return probeBufLock() == nil }

// TestWithoutBufLock moves sessions without SO_BUF_LOCK, as before Linux 5.14. Buffers stay locked without growing
// from move to move, and Lost has an entry.
func TestWithoutBufLock(t *testing.T) {
	defer func(was int) { soBufLock = was }(soBufLock)
	soBufLock = 9999
	if hasBufLock() {
		t.Fatal("the kernel still has it")
	}
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	var conn dumper = fresh{server}
	var first, last uint32
	for hop := range 4 {
		w.Hold() // keeps new data unacknowledged
		if hop == 0 {
			fill(t, server, func() bool { return true })
		}
		c := w.moveState(conn, func(s *State) {
			if hop == 0 {
				first = s.SndBuf
			}
			last = s.SndBuf
		})
		if hop == 0 && len(c.Lost) == 0 {
			t.Error("nobody tells that the buffer no longer grows")
		}
		conn = c
	}
	if last != first {
		t.Errorf("the send buffer had %d bytes, and has %d", first, last)
	}
	nstest.Until(t, "the client has something", func() bool { return unread(t, client) > 0 })
	w.WantNoResets()
}

// chat sends a megabyte in each direction, and verifies it.
func chat(t testing.TB, client *net.TCPConn, server net.Conn) {
	t.Helper()
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		transmit(t, way[0], way[1], 1<<20, 0)
	}
}

// transmit sends n bytes of the pattern from offset on, and verifies the received data.
func transmit(t testing.TB, from, to net.Conn, n int, offset uint64) {
	t.Helper()
	for _, c := range []net.Conn{from, to} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	b, got := make([]byte, n), make([]byte, n)
	pattern(b, offset)
	together(func() {
		if m, err := from.Write(b); err != nil {
			t.Errorf("write, after %d bytes of %d: %v", m, n, err)
		}
	}, func() {
		m, err := io.ReadFull(to, got)
		if err == nil {
			err = verify(got, offset)
		}
		if err != nil {
			t.Errorf("read, after %d bytes of %d: %v", m, n, err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
}

func sysctl(name, value string) func() error {
	return func() error { return os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0) }
}

// TestAgreementMoves checks that a move keeps the options negotiated in the SYNs, and that data flows with them.
func TestAgreementMoves(t *testing.T) {
	type end func(fd int) error
	maxseg := func(n int) end { return func(fd int) error { return setInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, n) } }
	rcvbuf := func(n int) end { return func(fd int) error { return setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, n) } }
	for _, tc := range []struct {
		name           string
		world          func() error // configures the client's namespace
		client, server end
		ok             func(s *State) bool
	}{
		{"everything", nil, nil, nil, func(s *State) bool { return s.SACK && s.Scaling && s.Timestamps && s.RcvScale > 0 }},
		{"small segments to the peer", nil, maxseg(700), nil, func(s *State) bool { return s.MSS == 700 }},
		{"small segments from the peer", nil, nil, maxseg(600), func(s *State) bool { return s.MSS == 600 }},
		{"the peer's scale smaller", nil, rcvbuf(4000), nil, func(s *State) bool { return s.SndScale < s.RcvScale }},
		{"the own scale smaller", nil, nil, rcvbuf(4000), func(s *State) bool { return s.RcvScale < s.SndScale }},
		{"no timestamps", sysctl("tcp_timestamps", "0"), nil, nil, func(s *State) bool { return !s.Timestamps && s.SACK }},
		{"no SACK", sysctl("tcp_sack", "0"), nil, nil, func(s *State) bool { return !s.SACK && s.Timestamps }},
		{"no scaling", sysctl("tcp_window_scaling", "0"), nil, nil, func(s *State) bool { return !s.Scaling && s.RcvScale == 0 }},
		{"none of all", func() error {
			return errors.Join(sysctl("tcp_timestamps", "0")(), sysctl("tcp_sack", "0")(), sysctl("tcp_window_scaling", "0")())
		}, nil, nil, func(s *State) bool { return !s.Timestamps && !s.SACK && !s.Scaling }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			if tc.world != nil {
				w.do(w.Client, tc.world)
			}
			client, server := w.pair("tcp4", tc.client, tc.server)
			before := agreement(t, server)
			chat(t, client, server)
			var conn dumper = fresh{server}
			for hop := range 3 {
				var state *State
				c := w.moveState(conn, func(s *State) { state = s })
				// After the first move scaling counts as negotiated, with zero bits.
				if !tc.ok(state) && !(hop > 0 && state.SndScale|state.RcvScale == 0) {
					t.Errorf("hop %d: %+v", hop, state)
				}
				after := agreement(t, c.TCPConn)
				if !after.timestamps && after.mss+12 == before.mss {
					after.mss = before.mss // room for timestamps is reserved until the next MTU check
				}
				if after != before {
					t.Errorf("hop %d: after the move %+v, before %+v", hop, after, before)
				}
				chat(t, client, c)
				conn = c
			}
			w.WantNoResets()
		})
	}
}

type agreedOn struct {
	sack, timestamps, microseconds bool
	snd, rcv                       uint8
	mss                            uint32 // of sent segments
}

func agreement(t testing.TB, c *net.TCPConn) (a agreedOn) {
	in(t, c, func(fd int) {
		i, err := tcpInfo(fd)
		if err != nil {
			t.Fatal(err)
		}
		a = agreedOn{sack: i.Options&optionSACK != 0, timestamps: i.Options&optionTimestamps != 0, microseconds: i.Options&optionMicrosec != 0, mss: i.SndMSS}
		if i.Options&optionScaling != 0 {
			a.snd, a.rcv = i.scales()
		}
	})
	return a
}

// TestLost checks that features missing from this kernel appear in Lost, and the session continues without them.
func TestLost(t *testing.T) {
	w := newWorld(t)
	client, server := w.pair("tcp4", nil, nil)
	c := w.moveState(fresh{server}, func(s *State) {
		s.Congestion = "westwood2"
		s.Options = append(s.Options, Option{250, 1})
	})
	if len(c.Lost) != 2 {
		t.Errorf("lost: %q, want the congestion control and the option", c.Lost)
	}
	chat(t, client, c)
}

// TestOptionNumbers checks the option numbers of the wire format.
func TestOptionNumbers(t *testing.T) {
	for i, o := range options {
		if int(o.id) != i+1 {
			t.Errorf("%s has number %d at place %d", o.name, o.id, i)
		}
	}
	doc, err := os.ReadFile("../../../docs/HANDOFF-WIRE.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range options {
		if want := fmt.Sprintf("%d %s", o.id, o.name); !slices.ContainsFunc([]string{"  " + want, "\n" + want}, func(s string) bool { return strings.Contains(string(doc), s) }) {
			t.Errorf("docs/HANDOFF-WIRE.md does not say %q", want)
		}
	}
}
