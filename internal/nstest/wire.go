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
	"github.com/weir-project/weir/internal/dump"
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

// NewWire creates two namespaces with a wire between them. It is for tests inside [Main].
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
	// With filters dropping everything, the ends must not lose each other's link address.
	neighbours(t, w.A, w.B, w.B4, w.B6)
	neighbours(t, w.B, w.A, w.A4, w.A6)
	w.waitReady(t)
	return w
}

// waitReady waits until the wire carries both families in both directions.
func (w *Wire) waitReady(t testing.TB) {
	t.Helper()
	waitCarried(t, end{w.A, w.A4, w.B, w.B4}, end{w.A, w.A6, w.B, w.B6}, end{w.B, w.B4, w.A, w.A4}, end{w.B, w.B6, w.A, w.A6})
}

// end is an end of a cable with an address, and the other end.
type end struct {
	ns     *netns.Handle
	addr   netip.Addr
	peer   *netns.Handle
	remote netip.Addr
}

// waitCarried waits until datagrams arrive at the other end. The kernel uses a device for IPv6 only
// after its own delayed notice of the link coming up.
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

// NewNetns creates a namespace for the duration of the test. It is for tests inside [Main].
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
		_ = netns.Delete(name) // the test may have deleted it
	})
	return ns
}

// Cable creates a veth pair between two namespaces, with both ends up.
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

// Address brings a device up and adds addresses, usable at once.
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

// AwaitAddresses waits until the devices of a namespace have their automatic settings: a state, and
// a link-local address with its routes. Duplicate address detection takes a second or two. Tests
// comparing settings before and after an operation need this wait. All devices must have a carrier.
func AwaitAddresses(t testing.TB, ns *netns.Handle) {
	t.Helper()
	Eventually(t, func() error {
		waiting := ""
		in(t, ns, func() error {
			all, err := dump.LinkList()
			for _, l := range all {
				a := l.Attrs()
				if a.Flags&net.FlagUp == 0 || a.Flags&net.FlagLoopback != 0 {
					continue
				}
				addrs, err := dump.AddrList(l, netlink.FAMILY_V6)
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

// neighbours adds permanent entries for the other end's link address.
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

// Ifindex returns the index of a device in a namespace.
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

// ListenUDP opens a socket in a namespace until the end of the test.
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

// patience is the time limit for a datagram. Over a wire it takes microseconds, but the machine may
// be busy.
const patience = 80 * time.Millisecond

// Arrives sends a datagram and reports whether it arrives at a socket. With should it waits longer.
func Arrives(t testing.TB, from, to *net.UDPConn, should bool) bool {
	t.Helper()
	return ArriveAt(t, []*net.UDPConn{from}, []*net.UDPConn{to}, []bool{should})[0]
}

// Arrive is Arrives for several pairs of sockets at once.
func Arrive(t testing.TB, from, to []*net.UDPConn) []bool {
	t.Helper()
	return ArriveAt(t, from, to, make([]bool, len(to)))
}

// wantedPatience is the time limit for an expected datagram. It exceeds the stall of a CPU. For an
// unexpected one that wait would be too long.
const wantedPatience = 30 * time.Second

// ArriveAt is Arrive with known expectations. Expected datagrams have more time and are awaited
// first, because the others would arrive with them.
func ArriveAt(t testing.TB, from, to []*net.UDPConn, wanted []bool) []bool {
	t.Helper()
	buf := make([]byte, 64)
	for i := range to {
		for {
			to[i].SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, err := to[i].Read(buf); err != nil {
				break // nothing is left from earlier calls
			}
		}
	}
	// All are sent from one CPU, so they arrive in order, even with a slow kernel. After the last
	// expected one, the missing earlier ones are known.
	onOneCPU(func() {
		for i := range to {
			// An error belongs to an earlier packet dropped on its way out.
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
			// The deadline may have passed during a stall, before Read checked the socket.
			out[i] = err == nil || hasArrived(t, to[i])
		}
	}
	return out
}

// hasArrived reports whether a datagram is in a socket's queue, and takes it out.
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

// onOneCPU calls f on a thread pinned to its CPU.
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

// Flows returns the families with datagrams arriving at B from A: "46", "4", "6" or "". It waits
// longer for wanted ones.
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
