// SPDX-License-Identifier: Apache-2.0

package compile_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/filtertest"
	"github.com/weir-project/weir/internal/nstest"
)

// attach attaches a program as the filter of a socket.
func attach(t *testing.T, c syscall.Conn, p *ebpf.Program) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_BPF, p.FD()) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
}

// patience bounds the wait for expected events. It exceeds the stalls of a busy machine, and a passing test does not
// use it up.
const patience = 30 * time.Second

// heard returns the received datagrams. It waits longer for the first should of them.
func heard(t *testing.T, c net.PacketConn, should int) (out []string) {
	t.Helper()
	b := make([]byte, 65536)
	for {
		wait := patience
		if len(out) >= should {
			wait = 100 * time.Millisecond
		}
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		n, _, err := c.ReadFrom(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return out
		} else if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(b[:min(n, 40)]))
	}
}

// A socket's program gets the datagram from its UDP header on, with the IP header before it. Large datagrams are not
// linear.
func TestSocket(t *testing.T) {
	nstest.NeedRoot(t)
	long := strings.Repeat("l", 20_000) + "xyzzy"
	for network, source := range map[string]string{"udp4": "ip.src == 127.0.0.1 and ip.proto == 17", "udp6": "ipv6.src == ::1 and ipv6.nxt == 17"} {
		t.Run(network, func(t *testing.T) {
			server, err := net.ListenPacket(network, map[string]string{"udp4": "127.0.0.1:0", "udp6": "[::1]:0"}[network])
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			port := server.LocalAddr().(*net.UDPAddr).Port
			rules := []compile.Rule{
				rule(compile.Drop, `%s and udp.dstport == %d and payload[-5:] == "xyzzy"`, source, port),
				rule(compile.Drop, `payload contains "needle" or payload == "exactly"`),
				rule(compile.Drop, `len(payload) == 7 or udp.length == 9`),
				rule(compile.Count, "udp"),
			}
			c := load(t, rules, compile.Options{Hook: compile.Socket})
			attach(t, server.(*net.UDPConn), c.Programs[compile.ProgramName])
			client, err := net.Dial(network, server.LocalAddr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			for _, s := range []string{"hello xyzzy", "hello", long, "a needle here", "exactly", "1234567", "x", long + "!", "exactly so"} {
				if _, err := client.Write([]byte(s)); err != nil {
					t.Fatal(err)
				}
			}
			if got, want := heard(t, server, 3), []string{"hello", long[:40], "exactly so"}; !slices.Equal(got, want) {
				t.Errorf("received %q, want %q", got, want)
			}
			counts, err := filtertest.ReadCounts(c.Maps[compile.CountsName], len(rules)+1)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range []uint64{2, 2, 2, 3, 3} {
				if counts[i].Packets != want {
					t.Errorf("rule %d: %d packets, want %d", i+1, counts[i].Packets, want)
				}
			}
		})
	}
}

// At tc, a tag removed from the frame by the device or the kernel still counts as a tag.
func TestTag(t *testing.T) {
	nstest.NeedRoot(t)
	a := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "tag-a"}, PeerName: "tag-b"}
	if err := netlink.LinkAdd(a); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = netlink.LinkDel(a) }()
	b, err := netlink.LinkByName("tag-b")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []netlink.Link{a, b} {
		if err := netlink.LinkSetUp(l); err != nil {
			t.Fatal(err)
		}
	}
	rules := []compile.Rule{
		rule(compile.Count, "vlan.id == 7 and vlan.priority == 3 and eth.type == 0x8100 and vlan.etype == 0x800 and udp.dstport == 53"),
		rule(compile.Count, "vlan.id == 7 and vlan.id == 9 and udp.dstport == 53"), rule(compile.Count, "vlan"), rule(compile.Count, "not vlan and udp.dstport == 53"),
	}
	c := load(t, rules, compile.Options{Hook: compile.TC})
	l, err := link.AttachTCX(link.TCXOptions{Interface: b.Attrs().Index, Program: c.Programs[compile.ProgramName], Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skip("need: kernel: tcx (Linux 6.6)")
	} else if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	up(t, "tag-a")
	up(t, "tag-b")
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	frame := datagram([4]byte{10, 0, 0, 1}, 53, "a payload of some length")
	tag := func(tags ...byte) []byte { return slices.Concat(frame[:12], tags, frame[12:]) }
	for _, f := range [][]byte{frame, tag(0x81, 0, 0x60, 7), tag(0x88, 0xa8, 0, 7, 0x81, 0, 0, 9), tag(0x81, 0, 0, 8)} {
		if err := unix.Sendto(fd, f, 0, &unix.SockaddrLinklayer{Ifindex: a.Attrs().Index}); err != nil {
			t.Fatal(err)
		}
	}
	wantCounts(t, c.Maps[compile.CountsName], 1, 1, 3, 1)
}

// A payload ends as given by its UDP header, as at sockets. Surplus bytes after it do not hide its last ones.
// Datagrams sent with UDP_SEGMENT remain one packet until a device splits it, and have one payload: the UDP header
// has the total length.
func TestDatagramEnd(t *testing.T) {
	nstest.NeedRoot(t)
	w := nstest.NewWire(t)
	rules := []compile.Rule{
		rule(compile.Count, `udp.dstport == 5353 and payload[-5:] == "xyzzy" and len(payload) == 10 and not payload contains "trail"`),
		rule(compile.Count, `udp.dstport == 5354 and len(payload) == 2500 and udp.length == 2508 and payload[2490:] == "bbbbbxyzzy"`),
	}
	c := load(t, rules, compile.Options{Hook: compile.TC})
	if err := w.B.Do(func() error {
		b, err := net.InterfaceByName(nstest.WireDevice)
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: b.Index, Program: c.Programs[compile.ProgramName], Attach: ebpf.AttachTCXIngress})
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return err
	}); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skip("need: kernel: tcx (Linux 6.6)")
	} else if err != nil {
		t.Fatal(err)
	}
	surplus := append(udpHeader(5353, 8+10), "helloxyzzytrail"...)
	merged := strings.Repeat("a", 1000) + strings.Repeat("b", 1495) + "xyzzy"
	if err := w.A.Do(func() error {
		raw, err := net.Dial("ip4:udp", w.B4.String())
		if err != nil {
			return err
		}
		defer raw.Close()
		if _, err := raw.Write(surplus); err != nil {
			return err
		}
		u, err := net.Dial("udp4", w.B4.String()+":5354")
		if err != nil {
			return err
		}
		defer u.Close()
		conn, err := u.(syscall.Conn).SyscallConn()
		if err != nil {
			return err
		}
		e := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, 1000) })
		if err = errors.Join(e, err); err == nil {
			_, err = u.Write([]byte(merged))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	wantCounts(t, c.Maps[compile.CountsName], 1, 1)
}

// udpHeader returns a UDP header without a checksum.
func udpHeader(port, length uint16) []byte {
	h := binary.BigEndian.AppendUint16([]byte{0x13, 0x88}, port)
	return append(binary.BigEndian.AppendUint16(h, length), 0, 0)
}

// wantCounts waits until rules have counted these numbers of packets.
func wantCounts(t *testing.T, m *ebpf.Map, want ...uint64) {
	t.Helper()
	got := make([]uint64, len(want))
	nstest.Eventually(t, func() error {
		counts, err := filtertest.ReadCounts(m, len(want))
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			got[i] = counts[i].Packets
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("counted %d, want %d", got, want)
		}
		return nil
	})
}

// up waits until a device carries frames, shortly after it was set up.
func up(t *testing.T, name string) {
	t.Helper()
	nstest.Eventually(t, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if now := l.Attrs().OperState; now != netlink.OperUp {
			return fmt.Errorf("%s is %s", name, now)
		}
		return nil
	})
}

// A TCP socket's filter sees each segment. A dropped segment is retransmitted and dropped again.
func TestTCPSocket(t *testing.T) {
	nstest.NeedRoot(t)
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	server, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := net.Dial("tcp4", server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := server.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	rules := []compile.Rule{rule(compile.Drop, `tcp and payload contains "attack"`), rule(compile.Count, "tcp.flags.ack and tcp.len > 0 and payload[0] == 0x68")}
	c := load(t, rules, compile.Options{Hook: compile.Socket})
	attach(t, conn.(syscall.Conn), c.Programs[compile.ProgramName])
	b := make([]byte, 100)
	for _, x := range []struct {
		text string
		want bool
	}{{"hello", true}, {"an attack", false}} {
		if _, err := client.Write([]byte(x.text)); err != nil {
			t.Fatal(err)
		}
		wait := patience
		if !x.want {
			wait = 300 * time.Millisecond
		}
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		n, err := conn.Read(b)
		if got := err == nil && string(b[:n]) == x.text; got != x.want {
			t.Errorf("%q: heard %q, %v", x.text, b[:n], err)
		}
	}
	counts, err := filtertest.ReadCounts(c.Maps[compile.CountsName], len(rules))
	if err != nil {
		t.Fatal(err)
	}
	// On a stalled machine, received segments are retransmitted too.
	again := uint64(0)
	raw, err := client.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) {
		var i *unix.TCPInfo
		if i, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			again = uint64(i.Total_retrans)
		}
	}); e != nil || err != nil {
		t.Fatal(e, err)
	}
	if counts[0].Packets < 1 || counts[1].Packets < 1 || counts[1].Packets > 1+again {
		t.Errorf("%+v, but %d segments were retransmitted", counts, again)
	}
}
