// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
)

// Destroy and the exact lists require a namespace without other sockets.
func TestMain(m *testing.M) { nstest.Main(m) }

func listenTCP(t *testing.T, network, addr string) *net.TCPListener {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // on by default since Go 1.24
	l, err := lc.Listen(context.Background(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func listenUDP(t *testing.T, network, addr string) *net.UDPConn {
	t.Helper()
	c, err := net.ListenPacket(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

func dialTCP(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func addrPort(t *testing.T, a net.Addr) netip.AddrPort {
	t.Helper()
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		t.Fatal(err)
	}
	return ap
}

// identity returns the identity of a socket as reported to its owner.
func identity(t *testing.T, c syscall.Conn) (inode uint32, cookie uint64) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		var st unix.Stat_t
		if err := unix.Fstat(int(fd), &st); err != nil {
			t.Error(err)
		}
		inode = uint32(st.Ino)
		if cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return inode, cookie
}

func setInt(t *testing.T, c syscall.Conn, level, opt, value int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), level, opt, value) }); err != nil || inner != nil {
		t.Fatal(err, inner)
	}
}

func dump(t *testing.T, q sockdiag.Query) []sockdiag.Socket {
	t.Helper()
	s, err := sockdiag.Dump(q)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// patience is the time limit for expected events on a busy machine.
const patience = 30 * time.Second

// one lists the sockets and returns the only one.
func one(t *testing.T, q sockdiag.Query) sockdiag.Socket {
	t.Helper()
	var s []sockdiag.Socket
	// A connection is established at the server shortly after connect returns at the client.
	nstest.Eventually(t, func() error {
		if s = dump(t, q); len(s) == 0 {
			return fmt.Errorf("Dump(%+v) found no socket", q)
		}
		return nil
	})
	if len(s) != 1 {
		t.Fatalf("Dump(%+v) found %d sockets, want 1: %+v", q, len(s), s)
	}
	return s[0]
}

// oneWhen is one with a condition on the socket, because data from the peer arrives a little later.
// The caller checks the result.
func oneWhen(t *testing.T, q sockdiag.Query, ok func(sockdiag.Socket) bool) sockdiag.Socket {
	t.Helper()
	var s sockdiag.Socket
	_ = nstest.Poll(nstest.Timeout(), func() error {
		if s = one(t, q); !ok(s) {
			return errors.New("it is not yet as it is to become")
		}
		return nil
	})
	return s
}

func TestTCPListener(t *testing.T) {
	l := listenTCP(t, "tcp4", "127.0.0.1:0")
	listenTCP(t, "tcp4", "127.0.0.1:0") // another port, not to be listed
	addr := addrPort(t, l.Addr())
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 7) }); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		dialTCP(t, l.Addr().String())
	}
	q := sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen, LocalPort: addr.Port()}
	s := oneWhen(t, q, func(s sockdiag.Socket) bool { return s.RecvQueue >= 3 })
	inode, cookie := identity(t, l)
	if s.Proto != unix.IPPROTO_TCP || s.Family != unix.AF_INET || s.State != sockdiag.Listen || s.Local != addr ||
		s.Inode != inode || s.Cookie != cookie || s.UID != uint32(os.Geteuid()) || s.Interface != 0 || s.V6Only {
		t.Errorf("got %+v; want the listener %s, inode %d, cookie %d", s, addr, inode, cookie)
	}
	if s.RecvQueue != 3 || s.SendQueue != 7 {
		t.Errorf("queue %d of %d, want 3 of 7", s.RecvQueue, s.SendQueue)
	}
	if s.Info != nil {
		t.Error("Info without being asked for")
	}
}

func TestTCPEstablished(t *testing.T) {
	for _, c := range []struct {
		network, addr string
		family        uint8
	}{{"tcp4", "127.0.0.1:0", unix.AF_INET}, {"tcp6", "[::1]:0", unix.AF_INET6}} {
		t.Run(c.network, func(t *testing.T) {
			l := listenTCP(t, c.network, c.addr)
			client := dialTCP(t, l.Addr().String())
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			if _, err := client.Write(make([]byte, 1234)); err != nil {
				t.Fatal(err)
			}
			s := oneWhen(t, sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Established,
				LocalPort: addrPort(t, l.Addr()).Port(), Info: true}, func(s sockdiag.Socket) bool { return s.RecvQueue >= 1234 })
			inode, cookie := identity(t, server.(*net.TCPConn))
			if s.Family != c.family || s.Local != addrPort(t, server.LocalAddr()) || s.Remote != addrPort(t, client.LocalAddr()) ||
				s.Inode != inode || s.Cookie != cookie {
				t.Errorf("got %+v; want the server's side, inode %d, cookie %d", s, inode, cookie)
			}
			if s.RecvQueue != 1234 || s.Mem.RcvAlloc < 1234 || s.Mem.RcvBuf < s.Mem.RcvAlloc {
				t.Errorf("receive queue %d, memory %+v; want 1234 bytes queued", s.RecvQueue, s.Mem)
			}
			if i := s.Info; i == nil || i.BytesReceived != 1234 || i.DataSegsIn == 0 || i.SegsIn < i.DataSegsIn ||
				i.LastDataRecv < 0 || i.LastDataRecv > time.Minute || i.RTT <= 0 || i.RTT > time.Minute {
				t.Errorf("Info %+v; want 1234 bytes received a moment ago", i)
			}
		})
	}
}

func TestV6Only(t *testing.T) {
	for _, c := range []struct {
		network string
		v6only  bool
	}{{"6", true}, {"", false}} {
		l := listenTCP(t, "tcp"+c.network, "[::]:0")
		u := listenUDP(t, "udp"+c.network, "[::]:0")
		for _, q := range []sockdiag.Query{
			{Proto: unix.IPPROTO_TCP, LocalPort: addrPort(t, l.Addr()).Port()},
			{Proto: unix.IPPROTO_UDP, LocalPort: addrPort(t, u.LocalAddr()).Port()},
		} {
			s := one(t, q)
			if s.Family != unix.AF_INET6 || s.V6Only != c.v6only || s.Local.Addr() != netip.IPv6Unspecified() {
				t.Errorf("%+v: got %+v, want v6only %v on [::]", q, s, c.v6only)
			}
		}
	}
}

// TestMapped checks that IPv4 traffic of a dual-stack socket is reported with mapped addresses.
func TestMapped(t *testing.T) {
	l := listenTCP(t, "tcp", "[::]:0")
	port := addrPort(t, l.Addr()).Port()
	c := dialTCP(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
	s := one(t, sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Established, LocalPort: port})
	if s.Family != unix.AF_INET6 || !s.Remote.Addr().Is4In6() || s.Remote.Addr().Unmap() != addrPort(t, c.LocalAddr()).Addr() {
		t.Errorf("got %+v, want the mapped address of %s", s, c.LocalAddr())
	}
}

func TestUDPDrops(t *testing.T) {
	c := listenUDP(t, "udp4", "127.0.0.1:0")
	setInt(t, c, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)
	addr := addrPort(t, c.LocalAddr())
	q := sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: addr.Port(), Info: true}
	before := one(t, q)
	inode, cookie := identity(t, c)
	if before.Proto != unix.IPPROTO_UDP || before.State != sockdiag.Close || before.Local != addr || before.Inode != inode || before.Cookie != cookie {
		t.Errorf("got %+v; want %s, inode %d, cookie %d", before, addr, inode, cookie)
	}
	if before.Mem.Drops != 0 || before.Mem.RcvAlloc != 0 || before.Mem.RcvBuf != 2*4096 || before.Info != nil {
		t.Errorf("memory %+v, Info %v; want an empty buffer of 8192 and no Info", before.Mem, before.Info)
	}
	peer, err := net.Dial("udp4", c.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	const sent = 50
	for range sent {
		if _, err := peer.Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	full := oneWhen(t, q, func(s sockdiag.Socket) bool { return s.Mem.Drops > 0 })
	var received uint32
	drops := full.Mem.Drops
	buf := make([]byte, 2000)
	for start := time.Now(); drops+received < sent && time.Since(start) < patience; drops = one(t, q).Mem.Drops {
		for ; ; received++ {
			if err := c.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := c.ReadFrom(buf); err != nil {
				break
			}
		}
	}
	if full.Mem.Drops == 0 || drops+received != sent || full.RecvQueue == 0 {
		t.Errorf("drops %d, then %d + received %d, want %d together; queue %d", full.Mem.Drops, drops, received, sent, full.RecvQueue)
	}
	connected := one(t, sockdiag.Query{Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Established,
		LocalPort: addrPort(t, peer.LocalAddr()).Port()})
	if connected.Remote != addr {
		t.Errorf("the connected peer is %+v, want remote %s", connected, addr)
	}
}

func TestInterface(t *testing.T) {
	nstest.NeedRoot(t)
	c := listenUDP(t, "udp4", "127.0.0.1:0")
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	setInt(t, c, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, lo.Index)
	s := one(t, sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: addrPort(t, c.LocalAddr()).Port()})
	if s.Interface != uint32(lo.Index) {
		t.Errorf("interface %d, want %d", s.Interface, lo.Index)
	}
}

// TestSeveral checks that all sockets on a port are listed: a reuseport group, and both families.
func TestSeveral(t *testing.T) {
	nstest.NeedRoot(t)
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		}), err)
	}}
	var want []uint64
	for _, a := range []struct{ network, addr string }{
		{"udp4", "0.0.0.0:4739"}, {"udp4", "0.0.0.0:4739"}, {"udp6", "[::]:4739"}, {"udp4", "127.0.0.1:4740"},
	} {
		c, err := lc.ListenPacket(context.Background(), a.network, a.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, cookie := identity(t, c.(*net.UDPConn)); a.addr != "127.0.0.1:4740" {
			want = append(want, cookie)
		}
	}
	var got []uint64
	for _, s := range dump(t, sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: 4739}) {
		got = append(got, s.Cookie)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("cookies %v, want %v", got, want)
	}
	if all := dump(t, sockdiag.Query{Proto: unix.IPPROTO_UDP}); len(all) != 4 {
		t.Errorf("%d UDP sockets in the namespace, want 4: %+v", len(all), all)
	}
}

func TestNamespace(t *testing.T) {
	nstest.NeedRoot(t)
	h, err := netns.Create("sd-other")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete("sd-other")
	defer h.Close()
	var c net.PacketConn
	q := sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: 4741}
	err = h.Do(func() error {
		if c, err = net.ListenPacket("udp4", "127.0.0.1:4741"); err != nil {
			return err
		}
		one(t, q)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if s := dump(t, q); len(s) != 0 {
		t.Errorf("outside: %+v, want none", s)
	}
}

func TestMPTCPListeners(t *testing.T) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(true)
	l, err := lc.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	plain := listenTCP(t, "tcp4", "127.0.0.1:0")
	s, err := sockdiag.MPTCPListeners(addrPort(t, plain.Addr()).Port())
	if err != nil || len(s) != 0 {
		t.Errorf("on a plain listener's port: %+v, %v; want none", s, err)
	}
	// Go uses TCP if the kernel has no MPTCP, so check the socket.
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var proto int
	if err := raw.Control(func(fd uintptr) { proto, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL) }); err != nil {
		t.Fatal(err)
	}
	s, err = sockdiag.MPTCPListeners(addrPort(t, l.Addr()).Port())
	if err != nil {
		t.Fatal(err)
	}
	if proto != unix.IPPROTO_MPTCP {
		if len(s) != 0 {
			t.Errorf("without MPTCP in the kernel: %+v, want none", s)
		}
		t.Skip("need: kernel with CONFIG_MPTCP")
	}
	inode, _ := identity(t, l.(*net.TCPListener))
	if len(s) != 1 || s[0].Inode != inode || s[0].State != sockdiag.Listen || s[0].Local != addrPort(t, l.Addr()) {
		t.Errorf("got %+v, want the listener %s with inode %d", s, l.Addr(), inode)
	}
}

func TestBadArguments(t *testing.T) {
	if _, err := sockdiag.Dump(sockdiag.Query{}); err == nil {
		t.Error("Dump without a protocol succeeded")
	}
	if err := sockdiag.Destroy(sockdiag.Socket{Proto: unix.IPPROTO_TCP, Family: unix.AF_INET}); err == nil {
		t.Error("Destroy of no socket succeeded")
	}
}

func BenchmarkDumpPort(b *testing.B) {
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	q := sockdiag.Query{Proto: unix.IPPROTO_UDP, LocalPort: uint16(c.LocalAddr().(*net.UDPAddr).Port)}
	for b.Loop() {
		if s, err := sockdiag.Dump(q); err != nil || len(s) != 1 {
			b.Fatal(len(s), err)
		}
	}
}
