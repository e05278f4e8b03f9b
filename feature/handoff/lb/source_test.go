// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// These are collectors' ports of services by source.
var (
	flows4, bmp4 = netip.MustParseAddrPort("10.55.0.1:4739"), netip.MustParseAddrPort("10.55.0.1:1790")
	flows6       = netip.MustParseAddrPort("[fd55::1]:4739")
)

// bySource returns a scene with a service by source over TCP and UDP.
func bySource(t *testing.T) *scene {
	t.Helper()
	sc := newScene(t)
	for _, s := range []Service{{ID: 5, Listen: flows4, Proto: unix.IPPROTO_UDP, BySource: true}, {ID: 5, Listen: bmp4, Proto: unix.IPPROTO_TCP, BySource: true},
		{ID: 5, Listen: flows6, Proto: unix.IPPROTO_UDP, BySource: true}} {
		if err := sc.f.SetService(s); err != nil {
			t.Fatal(err)
		}
	}
	listenUDP(t, sc.hosts, flows4)
	listenUDP(t, sc.hosts, flows6)
	serve(t, sc.hosts, bmp4)
	return sc
}

func client4() Key { return Key{Client: netip.MustParseAddrPort("10.1.0.2:0"), Service: 5} }

// TestBySource checks that all datagrams and connections of a client go to one host, at any port.
// The end of one connection does not end the source. Known sources stay when the weights change.
func TestBySource(t *testing.T) {
	sc := bySource(t)
	one, err := askUDP(dialUDP(t, sc.client, flows4), "a")
	if err != nil {
		t.Fatal(err)
	}
	for range 8 {
		if got, err := askUDP(dialUDP(t, sc.client, flows4), "b"); err != nil || got[0] != one[0] {
			t.Fatalf("%q, %v, and first %q", got, err, one)
		}
		c := dial(t, sc.client, bmp4)
		if got, err := ask(c, "c", patience); err != nil || got[0] != one[0] {
			t.Fatalf("a connection: %q, %v, and datagrams %q", got, err, one)
		}
		c.Close()
	}
	nstest.Steadily(t, 50*time.Millisecond, func() error {
		n, err := sc.f.Forget(0, time.Hour)
		if err == nil && n != 0 {
			err = fmt.Errorf("%d forgotten", n)
		}
		return err
	})
	owner := move.Backend(one[0] - '0')
	if fl, err := sc.f.Flow(client4()); err != nil || fl.Owner != owner || fl.Ended {
		t.Errorf("%+v, %v", fl, err)
	}
	weigh(t, sc, owner, 0)
	if got, err := askUDP(dialUDP(t, sc.client, flows4), "d"); err != nil || got[0] != one[0] {
		t.Errorf("%q, %v: the client has changed its host", got, err)
	}
	if got, err := askUDP(dialUDP(t, sc.client, flows6), "e"); err != nil || got[0] == one[0] {
		t.Errorf("%q, %v: a new client goes to a host of weight 0", got, err)
	}
}

// TestFullTableKnowsNoSource checks that no source is learned with three quarters of the table
// taken, by datagrams or connections. Both are served.
func TestFullTableKnowsNoSource(t *testing.T) {
	sc := bySource(t)
	both := func() {
		t.Helper()
		if _, err := askUDP(dialUDP(t, sc.client, flows4), "a"); err != nil {
			t.Fatal(err)
		}
		if _, err := ask(dial(t, sc.client, bmp4), "b", patience); err != nil {
			t.Fatal(err)
		}
	}
	sc.f.full.Store(true)
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	both()
	if n, err := sc.f.Counts(); err != nil || n.Learned != 0 || n.Full != 0 {
		t.Errorf("%+v, %v: want nothing learned", n, err)
	}
	sc.f.full.Store(false)
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	both()
	if n, err := sc.f.Counts(); err != nil || n.Learned != 1 {
		t.Errorf("%+v, %v: want the source", n, err)
	}
}

// datagrams sends one datagram from each of several sources, beginning with 10.9.first.0.
func (s *scene) datagrams(t *testing.T, first byte, sources int) {
	t.Helper()
	before, err := s.f.Counts()
	if err != nil {
		t.Fatal(err)
	}
	do(t, s.client, func() error {
		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(raw)
		to := flows4.Addr().As4()
		b := make([]byte, 28)
		b[0], b[3], b[8], b[9] = 0x45, 28, 64, unix.IPPROTO_UDP
		copy(b[16:], to[:])
		binary.BigEndian.PutUint16(b[20:], 5555)
		binary.BigEndian.PutUint16(b[22:], flows4.Port())
		b[25] = 8
		for i := range sources {
			copy(b[12:], []byte{10, 9, first, byte(i)})
			if err := unix.Sendto(raw, b, 0, &unix.SockaddrInet4{Addr: to}); err != nil {
				return err
			}
		}
		return nil
	})
	nstest.Eventually(t, func() error {
		n, err := s.f.Counts()
		if err != nil || n.In < before.In+uint64(sources) {
			return fmt.Errorf("%+v, %v: want %d datagrams more than %d", n, err, sources, before.In)
		}
		return nil
	})
}

// TestBurstKnowsNoSource checks that a burst of sources takes at most three quarters of the table,
// although the agent counts it only once a second.
func TestBurstKnowsNoSource(t *testing.T) {
	sc := bySource(t)
	const room, sources, gone = 10, 200, 40
	fill(t, sc.f, int(sc.f.maps.LbFlows.MaxEntries())*3/4-room)
	learned := uint64(0)
	for first, left := range []uint64{room, gone, 0} {
		if first == 1 {
			if _, err := sc.f.maps.LbFlows.BatchDelete(firstKeys(t, sc.f, gone), nil); err != nil {
				t.Fatal(err)
			}
		}
		if n, err := sc.f.Forget(0, time.Hour); n != 0 || err != nil {
			t.Fatal(n, err)
		}
		sc.datagrams(t, byte(first), sources)
		n, err := sc.f.Counts()
		slack := uint64(runtime.NumCPU()) // each CPU may exceed the limit by one: a backend's answer makes a source known, too
		if err != nil || n.Learned+slack < learned+left || n.Learned > learned+left+slack || n.Full != 0 {
			t.Errorf("%+v, %v: want %d more than %d learned", n, err, left, learned)
		}
		learned = n.Learned
	}
}

// firstKeys returns the keys of n flows.
func firstKeys(t *testing.T, f *DataPath, n int) (keys []bpf.LBLbFlowKey) {
	t.Helper()
	if err := flow.Each(f.maps.LbFlows, func(k bpf.LBLbFlowKey, _ bpf.LBLbFlow) bool { keys = append(keys, k); return len(keys) < n }); err != nil {
		t.Fatal(err)
	}
	return keys
}

// weigh sets a host's weight; the other one has 1.
func weigh(t *testing.T, sc *scene, host move.Backend, weight int) {
	t.Helper()
	var hosts []Backend
	for i, ns := range sc.hosts {
		name := []string{"h1", "h2"}[i]
		dev := 0
		do(t, sc.f.ns, func() error {
			d, err := net.InterfaceByName(name)
			if err == nil {
				dev = d.Index
			}
			return err
		})
		h := Backend{Number: move.Backend(i + 1), Name: name, Interface: dev, MAC: mac(t, ns), Weight: 1}
		if h.Number == host {
			h.Weight = weight
		}
		hosts = append(hosts, h)
	}
	if err := sc.f.SetBackends(hosts); err != nil {
		t.Fatal(err)
	}
}

// TestOverride checks that an override selects a client's host until its release, for known and
// unknown clients. It does not cut a connection of a service by flow.
func TestOverride(t *testing.T) {
	sc := bySource(t)
	for _, host := range []move.Backend{1, 2, 1, 2} {
		if err := sc.f.override(client4(), host); err != nil {
			t.Fatal(err)
		}
		if got, err := askUDP(dialUDP(t, sc.client, flows4), "a"); err != nil || got[0] != byte('0'+host) {
			t.Fatalf("%q, %v: want host %d", got, err, host)
		}
	}
	if n, err := sc.f.Forget(0, 0); err != nil || n != 0 {
		t.Errorf("%d forgotten, %v: an override stays", n, err)
	}
	if err := sc.f.Release(client4()); err != nil {
		t.Fatal(err)
	}
	if err := sc.f.Release(client4()); !errors.Is(err, errNoFlow) {
		t.Errorf("%v", err)
	}
	c, k, owner, other := session(t, sc)
	if err := sc.f.override(k, other); !errors.Is(err, errLive) {
		t.Errorf("%v", err)
	}
	if _, err := ask(c, "a", patience); err != nil {
		t.Error(err)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner {
		t.Errorf("%+v, %v", fl, err)
	}
	// A future connection.
	k.Client = netip.AddrPortFrom(k.Client.Addr(), 40123)
	if err := sc.f.override(k, other); err != nil {
		t.Fatal(err)
	}
	do(t, sc.client, func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: k.Client.Addr().AsSlice(), Port: 40123}, Timeout: patience}
		c, err = d.Dial("tcp", service4.String())
		return err
	})
	defer c.Close()
	if got, err := ask(c, "a", patience); err != nil || got[0] != byte('0'+other) {
		t.Errorf("%q, %v: want host %d", got, err, other)
	}
}

// TestFragments checks that later fragments of a datagram reach the host of their source, and are
// dropped and counted for a service by flow.
func TestFragments(t *testing.T) {
	sc := bySource(t)
	for _, at := range []netip.AddrPort{flows4, flows6} {
		if got, err := askUDP(dialUDP(t, sc.client, at), strings.Repeat("x", 5000)); err != nil || len(got) != 5001 {
			t.Errorf("%s: %d bytes, %v", at, len(got), err)
		}
	}
	dns := netip.MustParseAddrPort("10.55.0.1:53")
	if c, err := sc.f.Counts(); err != nil || c.Fragment != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if err := sc.f.SetService(Service{ID: 6, Listen: dns, Proto: unix.IPPROTO_UDP}); err != nil {
		t.Fatal(err)
	}
	listenUDP(t, sc.hosts, dns)
	c := dialUDP(t, sc.client, dns)
	if got, err := askUDP(c, "x"); err != nil || len(got) != 2 {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := c.Write(make([]byte, 4000)); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		n, err := sc.f.Counts()
		if err != nil || n.Fragment != 2 {
			return fmt.Errorf("%+v, %v: want two dropped fragments", n, err)
		}
		return nil
	})
}

// TestDatagrams checks that datagrams by flow follow the hash, and a host's ICMP error reaches the
// client.
func TestDatagrams(t *testing.T) {
	sc := newScene(t)
	at := netip.MustParseAddrPort("10.55.0.1:53")
	if err := sc.f.SetService(Service{ID: 6, Listen: at, Proto: unix.IPPROTO_UDP}); err != nil {
		t.Fatal(err)
	}
	c := dialUDP(t, sc.client, at)
	if _, err := c.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 10)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v: want the host's ICMP error", err)
	}
	listenUDP(t, sc.hosts, at)
	of := map[byte]int{}
	for range 30 {
		c := dialUDP(t, sc.client, at)
		first, err := askUDP(c, "a")
		if err != nil {
			t.Fatal(err)
		}
		again, err := askUDP(c, "b")
		if err != nil || again[0] != first[0] {
			t.Fatalf("%q, then %q, %v", first, again, err)
		}
		of[first[0]]++
	}
	if of['1'] < 4 || of['2'] < 4 {
		t.Errorf("30 flows: %v", of)
	}
	if n, err := sc.f.Counts(); err != nil || n.Learned != 0 {
		t.Errorf("%+v, %v", n, err)
	}
}

// TestPacketTooBig checks that a router's Packet Too Big reaches the host of the packet.
func TestPacketTooBig(t *testing.T) {
	sc := newSceneBehind(t, true)
	for _, at := range []netip.AddrPort{service4, service6} {
		before, err := sc.f.Counts()
		if err != nil {
			t.Fatal(err)
		}
		serve(t, sc.hosts, at)
		for range 4 { // a host that has learned the path MTU observes it
			echoMuch(t, dial(t, sc.client, at))
		}
		after, err := sc.f.Counts()
		if err != nil || after.ICMP == before.ICMP || after.Mute+after.UnknownSource+after.NoBackend != 0 {
			t.Errorf("%s: %+v, %v: before %d errors", at, after, err, before.ICMP)
		}
	}
}

// TestOwn checks that ICMP errors of the load balancer's own kernel about a host's packets reach
// the host. The load balancer itself can also be a client.
func TestOwn(t *testing.T) {
	sc := newScene(t)
	for id, at := range []netip.AddrPort{service4, service6} {
		serve(t, sc.hosts, at)
		narrow(t, sc.middle, "c", at.Addr().Is6())
		before, err := sc.f.Counts()
		if err != nil {
			t.Fatal(err)
		}
		echoMuch(t, dial(t, sc.client, at))
		after, err := sc.f.Counts()
		if err != nil || after.ICMP == before.ICMP {
			t.Errorf("%s: %+v, %v: before %d errors", at, after, err, before.ICMP)
		}
		c := dial(t, sc.middle, at)
		got, err := ask(c, "a", patience)
		if err != nil {
			t.Fatal(err)
		}
		if fl, err := sc.f.Flow(keyOfConn(c, id)); err != nil || fl.Owner != move.Backend(got[0]-'0') {
			t.Errorf("%+v, %v, served by %s", fl, err, got)
		}
		// Its packets are buffered like others.
		k := keyOfConn(c, id)
		if err := sc.f.Buffer(k); err != nil {
			t.Fatal(err)
		}
		silent(t, c, "b")
		if n, err := sc.f.Flush(k); err != nil || n == 0 {
			t.Errorf("%d waited, %v", n, err)
		}
		answers(t, c, "b")
	}
}

// narrow sets an MTU of 1300 from a namespace towards the client.
func narrow(t *testing.T, ns *netns.Handle, device string, v6 bool) {
	t.Helper()
	to, bits := net.ParseIP("10.1.0.2").To4(), 32
	if v6 {
		to, bits = net.ParseIP("fd01::2"), 128
	}
	do(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: to, Mask: net.CIDRMask(bits, bits)}, MTU: 1300, MTULock: true, Scope: netlink.SCOPE_LINK})
	})
}
