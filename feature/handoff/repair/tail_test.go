// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// TestLostTail loses the source's last segments in the network. The destination must retransmit them. With Probe that
// takes a round trip, even if Nagle or a cork would hold back the last segment. Without it, it takes the kernel's
// first timeout of 3 s.
func TestLostTail(t *testing.T) {
	for _, tc := range []struct {
		name, network string
		bytes         int
		nodelay, cork int
	}{{"four segments", "tcp4", 5000, 1, 0}, {"Nagle", "tcp4", 5000, 0, 0}, {"a cork", "tcp4", 4000, 0, 1}, {"a part of one", "tcp4", 100, 0, 0},
		{"IPv6", "tcp6", 5000, 1, 0}, {"IPv4 on IPv6", "tcp", 5000, 1, 0}, {noTimestamps, "tcp4", 5000, 1, 0}} {
		t.Run(tc.name, func(t *testing.T) {
			// The machine may pause during a try: the fastest of five counts.
			took := time.Hour
			for try := 0; try < 5 && took > 800*time.Millisecond; try++ {
				took = lostTail(t, tc.network, tc.name == noTimestamps, tc.bytes, tc.nodelay, tc.cork)
				t.Logf("it came after %v", took)
			}
			if took > 800*time.Millisecond { // the kernel's timeouts are 1 s and 3 s
				t.Errorf("it came after %v", took)
			}
		})
	}
}

const noTimestamps = "no timestamps"

// lostTail moves a session after the loss of its last bytes, and returns the time until the client has them.
func lostTail(t *testing.T, network string, plain bool, bytes, nodelay, cork int) (took time.Duration) {
	t.Helper()
	w := newWorld(t)
	if plain {
		w.do(w.Client, func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_timestamps", []byte("0"), 0) })
	}
	client, server := w.pair(network, nil, nil)
	chat(t, client, server)
	nstest.Until(t, "all is acknowledged", func() (all bool) {
		in(t, server, func(fd int) { l, err := queueLengths(fd); all = err == nil && l.unacked == 0 })
		return all
	})
	at := client.LocalAddr().(*net.TCPAddr).AddrPort().Addr()
	hole := &netlink.Route{Dst: &net.IPNet{IP: at.AsSlice(), Mask: net.CIDRMask(at.BitLen(), at.BitLen())}, Type: unix.RTN_BLACKHOLE}
	w.do(w.Router, func() error { return netlink.RouteAdd(hole) })
	in(t, server, func(fd int) { ok(t, setInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, nodelay)) })
	write(t, server, bytes, 0)
	in(t, server, func(fd int) { ok(t, setInt(fd, unix.IPPROTO_TCP, unix.TCP_CORK, cork)) })
	s := w.dump(fresh{server})
	w.do(w.Router, func() error { return netlink.RouteDel(hole) })
	if len(s.Send) != bytes || s.Timestamps == plain {
		t.Errorf("%d bytes to be sent, timestamps: %v", len(s.Send), s.Timestamps)
	}
	begin := time.Now()
	w.Own(1 - w.Owner)
	var c *Conn
	w.do(w.Servers[w.Owner], func() (err error) { c, err = restore(s, RestoreOptions{Probe: true}); return err })
	defer c.Close()
	w.Route(w.Owner)
	w.Release()
	drain(t, client, bytes)
	took = time.Since(begin)
	in(t, c.TCPConn, func(fd int) {
		if got, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY); err != nil || got != nodelay {
			t.Errorf("TCP_NODELAY is %d, %v", got, err)
		}
		ok(t, setInt(fd, unix.IPPROTO_TCP, unix.TCP_CORK, 0))
	})
	chat(t, client, c)
	w.WantNoResets()
	return took
}

// TestPacketsBeforeStart delivers packets before the session's start, as a load balancer may. They acknowledge the
// last sent data, and the session accepts them.
func TestPacketsBeforeStart(t *testing.T) {
	for _, tc := range []struct {
		name, network string
		bytes         int // sent last
	}{{"a part of a segment", "tcp4", 100}, {"four segments", "tcp4", 5000}, {"IPv6", "tcp6", 5000}, {"IPv4 on IPv6", "tcp", 5000}, {"more than are sent again", "tcp4", 13000}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair(tc.network, nil, nil)
			chat(t, client, server)
			w.Hold()
			write(t, server, tc.bytes, 0)
			drain(t, client, tc.bytes)
			const words, size = 5, 1000
			for i := range words {
				write(t, client, size, uint64(i*size))
			}
			s := w.dump(fresh{server})
			if len(s.Send) != tc.bytes || len(s.Unread) != 0 {
				t.Fatalf("%d bytes of %d are not acknowledged, %d were received: want all, and none", len(s.Send), tc.bytes, len(s.Unread))
			}
			w.Own(1 - w.Owner)
			var b *Built
			w.do(w.Servers[w.Owner], func() (err error) { b, err = Build(s, RestoreOptions{Probe: true}); return err })
			defer b.Close()
			w.Route(w.Owner)
			if held := w.Release(); held < words {
				t.Errorf("%d packets were held", held)
			}
			nstest.Until(t, "the session has what was held", func() bool {
				l, err := queueLengths(b.FD())
				ok(t, err)
				return l.unread == words*size && l.unacked == 0
			})
			c, err := b.Start()
			ok(t, err)
			defer c.Close()
			drain(t, c, words*size)
			chat(t, client, c)
			w.WantNoResets()
		})
	}
}

// TestTailIsNotSent covers the cases without retransmission: no CAP_NET_RAW (reported in Lost), possible IPsec
// encryption, too much data in flight, and an unusable path. The session then sends a probe.
func TestTailIsNotSent(t *testing.T) {
	for _, tc := range []struct {
		name  string
		bytes int
		raw   bool // a raw socket is created
		lost  bool // Lost has an entry
	}{{"no right", 100, false, true}, {"IPsec", 100, false, false}, {"more", 13000, false, false}, {"no way out", 100, true, false}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair("tcp4", nil, nil)
			chat(t, client, server)
			w.Hold()
			write(t, server, tc.bytes, 0)
			drain(t, client, tc.bytes)
			s := w.dump(fresh{server})
			w.Own(1 - w.Owner)
			var b *Built
			lacks := false
			w.do(w.Servers[w.Owner], func() (err error) {
				switch tc.name {
				case "no right":
					defer dropRaw(t)()
				case "IPsec":
					err = netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(32, 32)},
						Dst: &net.IPNet{IP: net.IPv4(192, 0, 2, 2), Mask: net.CIDRMask(32, 32)}, Dir: netlink.XFRM_DIR_OUT})
					if lacks = errors.Is(err, unix.EPROTONOSUPPORT); lacks {
						return nil
					} else if err != nil {
						return err
					}
				}
				b, err = Build(s, RestoreOptions{Probe: true})
				return err
			})
			if lacks {
				t.Skip("need: kernel with IPsec (CONFIG_XFRM_USER)")
			}
			defer b.Close()
			if told := strings.Contains(strings.Join(b.Lost, "; "), "CAP_NET_RAW"); told != tc.lost || (b.tail != nil) != tc.raw {
				t.Fatalf("there is a raw socket: %v; lost: %q", b.tail != nil, b.Lost)
			}
			if tc.raw {
				b.tail.close()
				b.tail.fd = -1
			}
			asked := probes(t, w)
			w.Route(w.Owner)
			c, err := b.Start()
			ok(t, err)
			defer c.Close()
			if n := asked(); n != 1 {
				t.Errorf("%d probes, want 1", n)
			}
			w.Release()
			chat(t, client, c)
			w.WantNoResets()
		})
	}
}

// probes returns a counter of the destination's window probes from now on.
func probes(t *testing.T, w *world) func() int {
	t.Helper()
	read := func() (n int) {
		w.do(w.Servers[w.Owner], func() error {
			b, err := os.ReadFile("/proc/thread-self/net/netstat")
			lines := strings.Split(string(b), "\n") // names, then a line of numbers
			i := slices.Index(strings.Fields(lines[0]), "TCPWinProbe")
			if err == nil {
				n, err = strconv.Atoi(strings.Fields(lines[1])[i])
			}
			return err
		})
		return n
	}
	before := read()
	return func() int { return read() - before }
}

// dropRaw removes CAP_NET_RAW from the calling thread until back is called.
func dropRaw(t *testing.T) (back func()) {
	t.Helper()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var was [2]unix.CapUserData
	ok(t, unix.Capget(&head, &was[0]))
	now := was
	now[0].Effective &^= 1 << unix.CAP_NET_RAW
	ok(t, unix.Capset(&head, &now[0]))
	return func() { ok(t, unix.Capset(&head, &was[0])) }
}
