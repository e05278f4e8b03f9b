// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// copied returns a world with a service copied to a second service, canary.
func copied(t *testing.T, engine spec.Engine, first, second string) (w *world, original, canary *recorder) {
	t.Helper()
	w = newWorld(t, spec.Options{Slots: 1, Engine: engine, Copy: "canary", Templates: spec.TemplatesOff}, first)
	c := spec.Service{Spec: service.Spec{Name: "canary"}, Options: spec.Options{Slots: 1, Engine: engine, Templates: spec.TemplatesOff}}
	c.Listen = append(c.Listen, mustListen(t, second))
	w.cfg.Services = append(w.cfg.Services, c)
	start := func(i int, listen string) *recorder {
		network, addr, _ := strings.Cut(listen, " ")
		r := startRecorder(t, network, addr)
		w.cfg.Services[i].Members = []service.Member{{PID: r.pid()}}
		return r
	}
	return w, start(0, first), start(1, second)
}

// exporters sends n datagrams from different ports and returns their payloads by source.
func exporters(t *testing.T, ns *netns.Handle, from netip.Addr, to netip.AddrPort, n, size int) map[netip.AddrPort][]byte {
	t.Helper()
	sent := map[netip.AddrPort][]byte{}
	for i := range n {
		e := newExporter(t, ns, ipfix.IPFIX, from, to)
		payload := bytes.Repeat([]byte{byte(i + 1)}, size+i)
		if _, err := e.conn.Write(payload); err != nil {
			t.Fatal(err)
		}
		sent[e.addr()] = payload
	}
	return sent
}

// gotExactly checks that a recorder received each sent datagram exactly once.
func gotExactly(t *testing.T, who string, r *recorder, sent map[netip.AddrPort][]byte) {
	t.Helper()
	r.await(len(sent))
	var got []received
	nstest.Steadily(t, 50*time.Millisecond, func() error { // detects surplus datagrams
		if got = r.received(); len(got) != len(sent) {
			return fmt.Errorf("%s got %d datagrams of %d", who, len(got), len(sent))
		}
		return nil
	})
	for _, g := range got {
		if !bytes.Equal(sent[g.from], g.payload) {
			t.Errorf("%s got from %s %d bytes that were not sent so", who, g.from, len(g.payload))
		}
	}
}

// TestCopy: every datagram of a service reaches a second service with its source address, over a cable and over
// loopback, with the same or a different destination address.
func TestCopy(t *testing.T) {
	eachEngine(t, func(t *testing.T) {
		for _, c := range []struct{ name, first, second, from, to string }{
			{"cable, IPv4", "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992", "10.1.0.2", "10.1.0.1:9991"},
			{"cable, IPv6", "udp6 [::]:9991", "udp6 [::]:9992", "fd00:1:0::2", "[fd00:1:0::1]:9991"},
			{"cable, IPv4, another address", "udp4 10.1.0.1:9991", "udp4 10.1.0.9:9992", "10.1.0.2", "10.1.0.1:9991"},
			{"cable, IPv6, another address", "udp6 [fd00:1:0::1]:9991", "udp6 [fd00:1:0::9]:9991", "fd00:1:0::2", "[fd00:1:0::1]:9991"},
			{"loopback, IPv4", "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992", "127.0.0.7", "127.0.0.1:9991"},
			{"loopback, IPv4, another address", "udp4 127.0.0.1:9991", "udp4 127.0.0.9:9992", "127.0.0.7", "127.0.0.1:9991"},
			{"loopback, IPv6", "udp6 [::]:9991", "udp6 [::]:9992", "::1", "[::1]:9991"},
		} {
			if testing.Short() && underTest == spec.EngineReuseport {
				continue // too slow on an emulated kernel, and the filter is the same
			}
			t.Run(c.name, func(t *testing.T) {
				var ns *netns.Handle
				if strings.HasPrefix(c.name, "cable") {
					ns = cable(t)
					addAddresses(t, "collect0", "10.1.0.9/24", "fd00:1:0::9/64")
					checksummed(t, ns, "export0")
				}
				w, original, canary := copied(t, underTest, c.first, c.second)
				w.apply()
				sent := exporters(t, ns, netip.MustParseAddr(c.from), netip.MustParseAddrPort(c.to), 30, 100)
				gotExactly(t, "the service", original, sent)
				gotExactly(t, "its copy", canary, sent)
				if got := *w.state().Copies; got != (engine.Copies{To: "canary", Copied: 30}) {
					t.Errorf("status says %+v", got)
				}
				// Datagrams to the second service reach only this service.
				e := newExporter(t, ns, ipfix.IPFIX, netip.MustParseAddr(c.from), netip.MustParseAddrPort(strings.Replace(c.to, "9991", c.second[len(c.second)-4:], 1)))
				if strings.Contains(c.second, ":9991") {
					return
				}
				e.conn.Write([]byte("x"))
				if strings.HasSuffix(c.name, "another address") {
					return // no socket at this address
				}
				canary.await(31)
				if n := len(original.received()); n != 30 {
					t.Errorf("the service got %d datagrams of another", n)
				}
			})
		}
	})
}

func addAddresses(t *testing.T, link string, addrs ...string) {
	t.Helper()
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			t.Fatal(err)
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, addr); err != nil {
			t.Fatal(err)
		}
	}
}

// checksummed makes a device compute checksums on transmit. A veth omits them by default. The receiver drops datagrams
// with a wrong checksum.
func checksummed(t *testing.T, ns *netns.Handle, link string) {
	t.Helper()
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		value := [2]uint32{unix.ETHTOOL_STXCSUM, 0}
		var req [40]byte // struct ifreq
		copy(req[:], link)
		binary.NativeEndian.PutUint64(req[16:], uint64(uintptr(unsafe.Pointer(&value[0]))))
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req[0]))); errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		t.Fatal("turning checksum offload off: ", err)
	}
}

// TestCopyLeavesFragments: a fragmented datagram is delivered and counted as not copied. A copy would share the
// original's identification.
func TestCopyLeavesFragments(t *testing.T) {
	ns := cable(t)
	w, original, canary := copied(t, spec.EngineSkLookup, "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992")
	w.apply()
	sent := exporters(t, ns, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.1.0.1:9991"), 5, 3000)
	gotExactly(t, "the service", original, sent)
	if n := len(canary.received()); n != 0 {
		t.Errorf("%d datagrams in fragments were copied", n)
	}
	if got := *w.state().Copies; got != (engine.Copies{To: "canary", Fragmented: 5}) {
		t.Errorf("status says %+v", got)
	}
}

// TestCopyLeavesForwarded: forwarded datagrams are not copied.
func TestCopyLeavesForwarded(t *testing.T) {
	ns := cable(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) })
	collect, err := netlink.LinkByName("collect0")
	if err != nil {
		t.Fatal(err)
	}
	_, elsewhere, _ := net.ParseCIDR("203.0.113.0/24")
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: collect.Attrs().Index, Dst: elsewhere, Gw: net.ParseIP("10.1.0.2")}); err != nil {
		t.Fatal(err)
	}
	err = ns.Do(func() error {
		export, err := netlink.LinkByName("export0")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: export.Attrs().Index, Dst: elsewhere, Gw: net.ParseIP("10.1.0.1")})
	})
	if err != nil {
		t.Fatal(err)
	}
	w, original, canary := copied(t, spec.EngineSkLookup, "udp4 0.0.0.0:9991", "udp4 10.1.0.1:9992")
	w.apply()
	exporters(t, ns, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("203.0.113.9:9991"), 5, 100)
	sent := exporters(t, ns, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.1.0.1:9991"), 5, 100)
	gotExactly(t, "the service", original, sent)
	gotExactly(t, "its copy", canary, sent)
}

// TestCopyFollowsDevices: weir serve adds new devices, and removes devices that become ports of a bridge. Their packets
// arrive at the bridge.
func TestCopyFollowsDevices(t *testing.T) {
	w, original, canary := copied(t, spec.EngineSkLookup, "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992")
	w.apply()
	w.serve()
	ns := cable(t)
	collect, err := netlink.LinkByName("collect0")
	if err != nil {
		t.Fatal(err)
	}
	filter := func(index int) bool {
		on, err := kernel.Clsact{Ifindex: index, Name: engine.CopyFilter}.Attached()
		return on && err == nil
	}
	deadline(t, func() bool { return filter(collect.Attrs().Index) })
	sent := exporters(t, ns, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.1.0.1:9991"), 5, 100)
	gotExactly(t, "the service", original, sent)
	gotExactly(t, "its copy", canary, sent)

	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(bridge) })
	if err := netlink.LinkSetMaster(collect, bridge); err != nil {
		t.Fatal(err)
	}
	addr, _ := netlink.ParseAddr("10.1.0.1/24")
	netlink.AddrDel(collect, addr)
	addAddresses(t, "br0", "10.1.0.1/24")
	if err := netlink.LinkSetUp(bridge); err != nil {
		t.Fatal(err)
	}
	deadline(t, func() bool { return !filter(collect.Attrs().Index) && filter(bridge.Attrs().Index) })
	deadline(t, func() bool { // the address has moved: a neighbour entry may be stale, or the port still learning
		exporters(t, ns, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.1.0.1:9991"), 1, 100)
		return nstest.Poll(100*time.Millisecond, func() error {
			if len(original.received()) <= len(sent) {
				return errors.New("none has come")
			}
			return nil
		}) == nil
	})
	deadline(t, func() bool { return len(canary.received()) == len(original.received()) })
}

// TestCopyLeavesNothing: foreign filters and qdiscs stay, and weir's are removed.
func TestCopyLeavesNothing(t *testing.T) {
	cable(t)
	collect, err := netlink.LinkByName("collect0")
	if err != nil {
		t.Fatal(err)
	}
	theirs := &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{LinkIndex: collect.Attrs().Index,
		Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	if err := netlink.QdiscAdd(theirs); err != nil {
		t.Fatal(err)
	}
	w, _, _ := copied(t, spec.EngineSkLookup, "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992")
	w.apply()
	if got := tcState(t); got != "1: clsact weir_copy, 2: clsact weir_copy" {
		t.Fatalf("with a copy there is %s", got)
	}
	if steps := w.apply(); len(steps) > 0 {
		t.Errorf("applied again: %s", steps)
	}
	w.cfg.Services[0].Copy = ""
	w.apply()
	if got := tcState(t); got != "1:, 2: clsact" {
		t.Errorf("without a copy there is %s", got)
	}
}

// tcState describes the qdiscs and filters of this namespace. The test's devices are named 1 and 2, regardless of their
// index.
func tcState(t *testing.T) string {
	t.Helper()
	links, err := dump.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range links {
		if n := l.Attrs().Name; n != "lo" && n != "collect0" {
			continue
		}
		text := fmt.Sprintf("%d:", len(out)+1)
		qdiscs, err := dump.QdiscList(l)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range qdiscs {
			if q.Type() == "clsact" {
				text += " clsact"
			}
		}
		filters, _ := dump.FilterList(l, netlink.HANDLE_MIN_INGRESS)
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok {
				text += " " + b.Name
			}
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

// TestCopyKilledAtEveryStep kills a command at every step while it starts, changes or ends a copy. The next command
// completes it. Nothing remains at the end.
func TestCopyKilledAtEveryStep(t *testing.T) {
	cable(t)
	w, _, _ := copied(t, spec.EngineSkLookup, "udp4 0.0.0.0:9991", "udp4 0.0.0.0:9992")
	for _, c := range []struct{ name, from, to string }{{"begin", "", "canary"}, {"end", "canary", ""}} {
		t.Run(c.name, func(t *testing.T) {
			for step := rand.IntN(3 * stride()); ; step += 3 * stride() { // most steps are common to all changes
				w.cfg.Services[0].Copy = c.from
				w.apply()
				w.cfg.Services[0].Copy = c.to
				finished := w.killedApply(step)
				w.apply()
				want := "1:, 2:"
				if c.to != "" {
					want = "1: clsact weir_copy, 2: clsact weir_copy"
				}
				if got := tcState(t); got != want {
					t.Fatalf("killed at step %d, then applied: %s", step, got)
				}
				w.remove()
				if got := tcState(t); got != "1:, 2:" {
					t.Fatalf("killed at step %d, then removed: %s", step, got)
				}
				if finished {
					t.Logf("killed at each of %d steps", step)
					return
				}
			}
		})
	}
}

// TestCopyConfig: an impossible copy is rejected in the configuration.
func TestCopyConfig(t *testing.T) {
	svc := func(name, copyTo, ns string, listen ...string) spec.Service {
		s := spec.Service{Spec: service.Spec{Name: name, Netns: ns}, Options: spec.Options{Slots: 1, Copy: copyTo}}
		for _, l := range listen {
			s.Listen = append(s.Listen, mustListen(t, l))
		}
		return s
	}
	for _, c := range []struct {
		name, want string
		services   []spec.Service
	}{
		{"nobody", `service "b" does not exist`, []spec.Service{svc("a", "b", "", "udp :1")}},
		{"itself", "loop", []spec.Service{svc("a", "a", "", "udp :1")}},
		{"a circle", "loop", []spec.Service{svc("a", "b", "", "udp :1"), svc("b", "c", "", "udp :2"), svc("c", "a", "", "udp :3")}},
		{"another namespace", "another network namespace", []spec.Service{svc("a", "b", "", "udp :1"), svc("b", "", "red", "udp :2")}},
		{"TCP alone", "no UDP listen", []spec.Service{svc("a", "b", "", "tcp :1"), svc("b", "", "", "udp :2")}},
		{"no UDP there", "add a udp listen of this family", []spec.Service{svc("a", "b", "", "udp :1"), svc("b", "", "", "tcp :2")}},
		{"no IPv6 there", "add a udp listen of this family", []spec.Service{svc("a", "b", "", "udp :1"), svc("b", "", "", "udp4 0.0.0.0:2")}},
		{"two for three", "use the same number, or one", []spec.Service{svc("a", "b", "", "udp :1", "udp :2", "udp :3"), svc("b", "", "", "udp :4", "udp :5")}},
		{"to a prefix", "a copy has no address", []spec.Service{svc("a", "b", "", "udp4 0.0.0.0:1"), svc("b", "", "", "udp4 10.0.0.0/8:2")}},
		{"three to one", "", []spec.Service{svc("a", "b", "", "udp :1", "udp :2", "udp :3"), svc("b", "", "", "udp :4")}},
		{"a chain", "", []spec.Service{svc("a", "b", "", "udp :1"), svc("b", "c", "", "udp :2"), svc("c", "", "", "udp :3")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := spec.Config{Services: c.services}
			var text strings.Builder
			for _, err := range cfg.Validate() {
				fmt.Fprintln(&text, err)
			}
			if c.want == "" && text.Len() > 0 || !strings.Contains(text.String(), c.want) {
				t.Errorf("errors %q, want %q", text.String(), c.want)
			}
		})
	}
}
