// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/kernel/probe"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"apply": playApply})
	nstest.Main(m)
}

// world is a triangle of routers with a host at each side: s – r1 – r2 – d, and r1 – r3 – r2. The link r1 – r2,
// "main" at r1, is protected. "back" at r1 leads to r3.
type world struct {
	testing.TB
	s, r1, r2, r3, d *netns.Handle
	root             *kernel.Root
}

const (
	sidEnd = "fc00:3::e"  // of r3
	sidDT6 = "fc00:2::d6" // of r2, for IPv6 packets
	sidDX4 = "fc00:2::d4" // of r2, for IPv4 packets
	addrD  = "fd00:d::2"
	addrS  = "fd00:a::2"
	addrD4 = "10.4.0.2"
	addrS4 = "10.1.0.2"
)

func newWorld(t testing.TB) *world {
	t.Helper()
	nstest.NeedRoot(t)
	if err := probe.RedirectNeigh.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("need: tool ip (Debian package iproute2)")
	}
	w := &world{TB: t, root: kernel.OpenRoot(filepath.Join(nstest.BPFFS, "w"+strconv.Itoa(int(time.Now().UnixNano()%1e9))))}
	for _, n := range []**netns.Handle{&w.s, &w.r1, &w.r2, &w.r3, &w.d} {
		*n = nstest.NewNetns(t)
		w.sysctls(*n, "net/ipv6/conf/all/forwarding=1", "net/ipv4/ip_forward=1", "net/ipv6/conf/all/seg6_enabled=1", "net/ipv6/conf/default/seg6_enabled=1",
			"net/ipv6/conf/all/accept_dad=0", "net/ipv6/conf/default/accept_dad=0", "net/ipv4/conf/all/rp_filter=0", "net/ipv4/conf/default/rp_filter=0")
	}
	t.Cleanup(w.remove)
	w.cable(w.s, "out", w.r1, "in", "fd00:a::2/64 10.1.0.2/24", "fd00:a::1/64 10.1.0.1/24")
	w.cable(w.r1, "main", w.r2, "main", "fd00:12::1/64 10.12.0.1/24", "fd00:12::2/64 10.12.0.2/24")
	w.cable(w.r1, "back", w.r3, "r1", "fd00:13::1/64", "fd00:13::3/64")
	w.cable(w.r3, "r2", w.r2, "back", "fd00:32::3/64", "fd00:32::2/64")
	w.cable(w.r2, "out", w.d, "in", "fd00:d::1/64 10.4.0.1/24", "fd00:d::2/64 10.4.0.2/24")
	w.ip(w.s, "route add default via fd00:a::1", "route add default via 10.1.0.1")
	w.ip(w.d, "route add default via fd00:d::1", "route add default via 10.4.0.1")
	w.ip(w.r1, "addr add fc00:1::1/128 dev lo nodad", "route add fc00:2::/32 via fd00:12::2", "route add fc00:3::/32 via fd00:13::3",
		"route add fd00:d::/64 via fd00:12::2", "route add 10.4.0.0/24 via 10.12.0.2")
	w.ip(w.r2, "route add fc00:1::/32 via fd00:12::1", "route add fc00:3::/32 via fd00:32::3", "route add fd00:a::/64 via fd00:32::3",
		"route add 10.1.0.0/24 via inet6 fd00:32::3", "route add "+sidDT6+" encap seg6local action End.DT6 table main dev back",
		"route add "+sidDX4+" encap seg6local action End.DX4 nh4 10.4.0.2 dev out")
	w.ip(w.r3, "route add fc00:1::/32 via fd00:13::1", "route add fc00:2::/32 via fd00:32::2", "route add fd00:d::/64 via fd00:32::2",
		"route add fd00:a::/64 via fd00:13::1", "route add 10.1.0.0/24 via inet6 fd00:13::1", "route add 10.4.0.0/24 via inet6 fd00:32::2", "route add "+sidEnd+" encap seg6local action End dev r1")
	for _, ns := range []*netns.Handle{w.s, w.r1, w.r2, w.r3, w.d} {
		nstest.AwaitAddresses(t, ns)
	}
	return w
}

// remove removes protection. Its helper namespace would otherwise outlive the test.
func (w *world) remove() {
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.Error(err)
		return
	}
	defer l.Unlock()
	if err := Remove(context.Background(), l); err != nil {
		w.Error(err)
	}
}

func (w *world) in(ns *netns.Handle, f func() error) {
	w.Helper()
	if err := ns.Do(f); err != nil {
		w.Fatal(err)
	}
}

func (w *world) sysctls(ns *netns.Handle, all ...string) {
	w.Helper()
	w.in(ns, func() error {
		for _, a := range all {
			name, value, _ := strings.Cut(a, "=")
			if err := sysctl(name, value); err != nil {
				return err
			}
		}
		return nil
	})
}

// ip runs commands of iproute2, with -6 for IPv6 routes.
func (w *world) ip(ns *netns.Handle, commands ...string) string {
	w.Helper()
	var out []byte
	w.in(ns, func() (err error) {
		for _, c := range commands {
			args := strings.Fields(c)
			if strings.Contains(c, "::") && !strings.Contains(c, "inet6") || strings.Contains(c, "-6") {
				args = append([]string{"-6"}, args...)
			}
			if out, err = exec.Command("ip", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", c, err, out)
			}
		}
		return nil
	})
	return string(out)
}

func (w *world) cable(a *netns.Handle, nameA string, b *netns.Handle, nameB, addrsA, addrsB string) {
	w.Helper()
	nstest.Cable(w, a, nameA, b, nameB)
	nstest.Address(w, a, nameA, prefixes(addrsA)...)
	nstest.Address(w, b, nameB, prefixes(addrsB)...)
}

func prefixes(text string) (out []netip.Prefix) {
	for _, f := range strings.Fields(text) {
		out = append(out, netip.MustParsePrefix(f))
	}
	return out
}

func addrs(text ...string) (out []netip.Addr) {
	for _, a := range text {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

// around returns the repair of the world's link: through r3 to r2, the decapsulating router.
func around() Repair {
	return Repair{Segments: addrs(sidEnd, sidDT6), Segments4: addrs(sidEnd, sidDX4)}
}

func (w *world) path(r ...Repair) Path {
	return Path{Name: "core", Netns: netnsName(w.r1), Device: "main", Repairs: r}
}

// netnsName returns the name of a namespace, the last word of its String.
func netnsName(h *netns.Handle) string {
	f := strings.Fields(h.String())
	return f[len(f)-1]
}

func (w *world) apply(paths ...Path) []string {
	w.Helper()
	said, err := applyTo(w.root, Config{Paths: paths})
	if err != nil {
		w.Fatal(err)
	}
	return said
}

func applyTo(root *kernel.Root, c Config) (said []string, err error) {
	ctx := context.Background()
	if errs := c.Validate(); len(errs) > 0 {
		return nil, errs[0]
	}
	var p feature.Plan
	said, err = featuretest.ApplyPlan(ctx, root, Recover, func() (feature.Plan, error) {
		st, err := ReadState(ctx, root)
		if err != nil {
			return p, err
		}
		p, err = Plan(ctx, st, c)
		return p, err
	})
	return append(said, p.Warnings...), err
}

// playApply applies a configuration and dies at a given step.
func playApply(args []string) error {
	var c Config
	if err := json.Unmarshal([]byte(args[2]), &c); err != nil {
		return err
	}
	kerneltest.DieAt(args[1])
	_, err := applyTo(kernel.OpenRoot(args[0]), c)
	return err
}

// state reads the path by name.
func (w *world) state(name string) PathState {
	w.Helper()
	st, err := ReadState(context.Background(), w.root)
	if err != nil {
		w.Fatal(err)
	}
	for _, p := range st.Paths {
		if p.Name == name {
			return p
		}
	}
	w.Fatalf("no path %s in %+v", name, st.Paths)
	return PathState{}
}

// drain drains or undrains the path's link.
func (w *world) drain(on bool) {
	w.Helper()
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	defer l.Unlock()
	do := Undrain
	if on {
		do = Drain
	}
	if err := do(l, "core"); err != nil {
		w.Fatal(err)
	}
}

// pair is a connected pair of UDP sockets at s and d.
type pair struct {
	from, to *net.UDPConn
	v6       bool
}

func (w *world) pair(v6 bool) pair {
	w.Helper()
	s, d := addrS4, addrD4
	if v6 {
		s, d = addrS, addrD
	}
	return w.pairOf(w.s, s, d)
}

// pairOf connects a socket at an address of a namespace with one at d.
func (w *world) pairOf(ns *netns.Handle, s, d string) pair {
	w.Helper()
	p := pair{v6: strings.Contains(d, ":")}
	p.to = nstest.ListenUDP(w, w.d, netip.AddrPortFrom(netip.MustParseAddr(d), 0))
	w.in(ns, func() (err error) {
		p.from, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(s), 0)), p.to.LocalAddr().(*net.UDPAddr))
		return err
	})
	w.Cleanup(func() { p.from.Close() })
	return p
}

// option reads a socket option of the sender or, with a value, sets it.
func (p pair) option(t testing.TB, level, name int, value ...int) (v int) {
	t.Helper()
	c, err := p.from.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var inner error
	err = c.Control(func(fd uintptr) {
		if len(value) > 0 {
			inner = unix.SetsockoptInt(int(fd), level, name, value[0])
		} else {
			v, inner = unix.GetsockoptInt(int(fd), level, name)
		}
	})
	if err = errors.Join(err, inner); err != nil {
		t.Fatal(err)
	}
	return v
}

// arrives reports whether a datagram with size bytes of payload arrives unchanged.
func (p pair) arrives(size int, wait time.Duration) bool {
	payload := make([]byte, size)
	for i := range payload {
		payload[i] = byte(i * 7)
	}
	// The kernel may now report an earlier packet as too big.
	_, err := p.from.Write(payload)
	for range 10 {
		if !errors.Is(err, unix.EMSGSIZE) {
			break
		}
		_, err = p.from.Write(payload)
	}
	if err != nil {
		return false
	}
	buf := make([]byte, 70000)
	for end := time.Now().Add(wait); ; {
		_ = p.to.SetReadDeadline(end)
		n, err := p.to.Read(buf)
		if err != nil {
			return false
		}
		if bytes.Equal(buf[:n], payload) {
			return true
		}
	}
}

// patience is the time for a packet to arrive, on a machine that may stall for seconds.
const patience = 30 * time.Second

// mtu returns the sender's learnt path MTU, in bytes of an IP packet.
func (p pair) mtu(t testing.TB) int {
	t.Helper()
	if p.v6 {
		return p.option(t, unix.IPPROTO_IPV6, unix.IPV6_MTU)
	}
	return p.option(t, unix.IPPROTO_IP, unix.IP_MTU)
}

// discover sets the sender's path MTU discovery: unix.IP_PMTUDISC_DO or _DONT. The numbers for IPv6 are the same.
func (p pair) discover(t testing.TB, how int) {
	t.Helper()
	if p.v6 {
		p.option(t, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, how)
	} else {
		p.option(t, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, how)
	}
}

// slotOf returns a device's slot of the link states.
func slotOf(t testing.TB, ns *netns.Handle, dev string) uint32 {
	t.Helper()
	return links.Slot(nstest.Ifindex(t, ns, dev))
}
