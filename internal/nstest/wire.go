// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"golang.org/x/sys/unix"
)

// WireDevice is the name of the device at both ends of a [Wire].
const WireDevice = "w0"

// Wire is a veth pair between two namespaces that vanish with the test.
type Wire struct {
	A, B         *netns.Handle
	NameA, NameB string // of the namespaces
	// Addresses of the ends, in one IPv4 and one IPv6 network.
	A4, A6, B4, B6 netip.Addr
}

var wires atomic.Int32

// NewWire makes two namespaces with a wire between them. It is for packages whose
// tests run inside [Main].
func NewWire(t testing.TB) *Wire {
	t.Helper()
	NeedRoot(t)
	n := wires.Add(1)
	w := &Wire{NameA: fmt.Sprintf("wire%d-a", n), NameB: fmt.Sprintf("wire%d-b", n),
		A4: netip.MustParseAddr("10.77.0.1"), B4: netip.MustParseAddr("10.77.0.2"),
		A6: netip.MustParseAddr("fd77::1"), B6: netip.MustParseAddr("fd77::2")}
	w.A, w.B = newNetns(t, w.NameA), newNetns(t, w.NameB)
	Cable(t, w.A, WireDevice, w.B, WireDevice)
	Address(t, w.A, WireDevice, netip.PrefixFrom(w.A4, 24), netip.PrefixFrom(w.A6, 64))
	Address(t, w.B, WireDevice, netip.PrefixFrom(w.B4, 24), netip.PrefixFrom(w.B6, 64))
	// Filters that drop everything must not have the ends forget each other.
	neighbours(t, w.A, w.B, w.B4, w.B6)
	neighbours(t, w.B, w.A, w.A4, w.A6)
	w.waitReady(t)
	return w
}

// waitReady waits until the wire carries both families both ways.
func (w *Wire) waitReady(t testing.TB) {
	t.Helper()
	waitCarried(t, end{w.A, w.A4, w.B, w.B4}, end{w.A, w.A6, w.B, w.B6}, end{w.B, w.B4, w.A, w.A4}, end{w.B, w.B6, w.A, w.A6})
}

// end is one of a cable, with an address, and what is at the other.
type end struct {
	ns     *netns.Handle
	addr   netip.Addr
	peer   *netns.Handle
	remote netip.Addr
}

// waitCarried waits until datagrams arrive at the other end: the kernel lets IPv6 use a device
// only when it has heard, in its own time, that the link is up.
func waitCarried(t testing.TB, ends ...end) {
	t.Helper()
	var from, to []*net.UDPConn
	for _, e := range ends {
		from = append(from, ListenUDP(t, e.ns, netip.AddrPortFrom(e.addr, 0)))
		to = append(to, ListenUDP(t, e.peer, netip.AddrPortFrom(e.remote, 0)))
	}
	for end := time.Now().Add(wantedPatience); slices.Contains(Arrive(t, from, to), false); {
		if time.Now().After(end) {
			t.Fatalf("nstest: the wire carries nothing after %s", wantedPatience)
		}
	}
	for _, c := range append(from, to...) {
		c.Close()
	}
}

// NewNetns makes a namespace that vanishes with the test. It is for packages whose
// tests run inside [Main].
func NewNetns(t testing.TB) *netns.Handle {
	t.Helper()
	NeedRoot(t)
	return newNetns(t, fmt.Sprintf("ns%d", wires.Add(1)))
}

func newNetns(t testing.TB, name string) *netns.Handle {
	t.Helper()
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	t.Cleanup(func() {
		ns.Close()
		_ = netns.Delete(name) // the test may have done so
	})
	return ns
}

// Cable makes a veth pair between two namespaces, both ends up.
func Cable(t testing.TB, a *netns.Handle, nameA string, b *netns.Handle, nameB string) {
	t.Helper()
	in(t, a, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = nameA
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(b.FD())})
	})
	Address(t, a, nameA)
	Address(t, b, nameB)
}

// Address raises a device and gives it addresses, which are usable at once.
func Address(t testing.TB, ns *netns.Handle, device string, addrs ...netip.Prefix) {
	t.Helper()
	in(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.Addr().AsSlice(), Mask: net.CIDRMask(a.Bits(), a.Addr().BitLen())}}
			if a.Addr().Is6() {
				addr.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(l, addr); err != nil {
				return fmt.Errorf("address %s: %w", a, err)
			}
		}
		return netlink.LinkSetUp(l)
	})
}

// AwaitAddresses waits until the devices of a namespace have what the kernel gives them by itself: a state, and a link-local address with
// its routes, once it is known that nobody else has it, which takes a second or two. Who compares what is there before and after
// something else needs it. For devices with a carrier.
func AwaitAddresses(t testing.TB, ns *netns.Handle) {
	t.Helper()
	Eventually(t, func() error {
		waiting := ""
		in(t, ns, func() error {
			all, err := netlink.LinkList()
			for _, l := range all {
				a := l.Attrs()
				if a.Flags&net.FlagUp == 0 || a.Flags&net.FlagLoopback != 0 {
					continue
				}
				addrs, err := netlink.AddrList(l, netlink.FAMILY_V6)
				if err != nil {
					return err
				}
				has := slices.ContainsFunc(addrs, func(x netlink.Addr) bool { return x.IP.IsLinkLocalUnicast() && x.Flags&unix.IFA_F_TENTATIVE == 0 })
				if a.OperState != netlink.OperUp || !has {
					waiting = a.Name
				}
			}
			return err
		})
		if waiting != "" {
			return fmt.Errorf("nstest: %s has no link-local address", waiting)
		}
		return nil
	})
}

// neighbours tells one end the other's link address, for good.
func neighbours(t testing.TB, ns, of *netns.Handle, addrs ...netip.Addr) {
	t.Helper()
	var mac net.HardwareAddr
	in(t, of, func() error {
		l, err := netlink.LinkByName(WireDevice)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	in(t, ns, func() error {
		l, err := netlink.LinkByName(WireDevice)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}); err != nil {
				return fmt.Errorf("neighbour %s: %w", a, err)
			}
		}
		return nil
	})
}

// Ifindex is the number of a device in a namespace.
func Ifindex(t testing.TB, ns *netns.Handle, device string) (index int) {
	t.Helper()
	in(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			index = l.Attrs().Index
		}
		return err
	})
	return index
}

func in(t testing.TB, ns *netns.Handle, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatalf("nstest: %v", err)
	}
}

// ListenUDP opens a socket in a namespace, which the test's end closes.
func ListenUDP(t testing.TB, ns *netns.Handle, addr netip.AddrPort) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	in(t, ns, func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// patience is how long a datagram may take: over a wire it takes microseconds, but
// the machine may be busy.
const patience = 80 * time.Millisecond

// Arrives sends a datagram and says whether it came to a socket, for which it has
// more time if it should.
func Arrives(t testing.TB, from, to *net.UDPConn, should bool) bool {
	t.Helper()
	return ArriveAt(t, []*net.UDPConn{from}, []*net.UDPConn{to}, []bool{should})[0]
}

// Arrive is Arrives for several pairs of sockets at once.
func Arrive(t testing.TB, from, to []*net.UDPConn) []bool {
	t.Helper()
	return ArriveAt(t, from, to, make([]bool, len(to)))
}

// wantedPatience is how long a datagram may take that should arrive: longer than a CPU
// may stand still, which is not worth waiting for one that should not.
const wantedPatience = 30 * time.Second

// ArriveAt is Arrive for who knows which of the datagrams should arrive: those have
// more time, and are awaited first, for where they are the others would be, too.
func ArriveAt(t testing.TB, from, to []*net.UDPConn, wanted []bool) []bool {
	t.Helper()
	buf := make([]byte, 64)
	for i := range to {
		for {
			to[i].SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, err := to[i].Read(buf); err != nil {
				break // nothing is left from before
			}
		}
	}
	// All from one CPU: what is sent first arrives first, also where the kernel is behind, and with
	// the last that should arrive it is known which of those before it do not.
	onOneCPU(func() {
		for i := range to {
			// An error is that of a packet that was dropped on its way out.
			_, _ = from[i].WriteToUDPAddrPort([]byte("are you there"), to[i].LocalAddr().(*net.UDPAddr).AddrPort())
		}
	})
	sent := time.Now()
	out := make([]bool, len(to))
	for _, now := range []bool{true, false} {
		for i := range to {
			if wanted[i] != now {
				continue
			}
			end := sent.Add(patience)
			if now {
				end = sent.Add(wantedPatience)
			}
			to[i].SetReadDeadline(end)
			_, err := to[i].Read(buf)
			// The deadline may have passed while nothing ran here, and before Read looked at the socket.
			out[i] = err == nil || hasArrived(t, to[i])
		}
	}
	return out
}

// hasArrived says whether a datagram is in a socket's queue, and takes it out.
func hasArrived(t testing.TB, c *net.UDPConn) bool {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var got error
	if err := raw.Control(func(fd uintptr) {
		_, _, got = unix.Recvfrom(int(fd), make([]byte, 64), unix.MSG_DONTWAIT)
	}); err != nil {
		t.Fatal(err)
	}
	return got == nil
}

// onOneCPU calls f on a thread that stays where it is.
func onOneCPU(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was, one unix.CPUSet
	if unix.SchedGetaffinity(0, &was) == nil {
		for {
			if n := rand.IntN(8 * int(unsafe.Sizeof(was))); was.IsSet(n) {
				one.Set(n)
				break
			}
		}
		if unix.SchedSetaffinity(0, &one) == nil { // refused in some containers
			defer unix.SchedSetaffinity(0, &was)
		}
	}
	f()
}

// Flows says from which families datagrams arrive at B from A: "46", "4", "6" or "". It waits longer for those that are wanted.
func (w *Wire) Flows(t testing.TB, wanted string) string {
	t.Helper()
	var out []string
	for _, f := range []struct {
		name     string
		from, to netip.Addr
	}{{"4", w.A4, w.B4}, {"6", w.A6, w.B6}} {
		to := ListenUDP(t, w.B, netip.AddrPortFrom(f.to, 0))
		from := ListenUDP(t, w.A, netip.AddrPortFrom(f.from, 0))
		if Arrives(t, from, to, strings.Contains(wanted, f.name)) {
			out = append(out, f.name)
		}
		to.Close()
		from.Close()
	}
	return strings.Join(out, "")
}
