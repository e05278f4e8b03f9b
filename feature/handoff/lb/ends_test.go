// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// These are flags of TCP.
const (
	tcpFIN = 1
	tcpSYN = 2
	tcpRST = 4
	tcpPSH = 8
	tcpACK = 16
)

// segment is a forged TCP segment without data.
type segment struct {
	flags    byte
	seq, ack uint32
	wrong    bool // checksum
	fragment bool // the first fragment of a packet without the rest
}

// forge sends a forged segment from the client's network.
func forge(t *testing.T, sc *scene, from, to netip.AddrPort, flags byte) {
	t.Helper()
	segment{flags: flags, seq: 0x12345678}.forge(t, sc, from, to)
}

func (s segment) forge(t *testing.T, sc *scene, from, to netip.AddrPort) {
	t.Helper()
	do(t, sc.client, func() error {
		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(raw)
		return unix.Sendto(raw, s.packet(from, to), 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
	})
}

func (s segment) packet(from, to netip.AddrPort) []byte {
	src, dst := from.Addr().As4(), to.Addr().As4()
	b := make([]byte, 40)
	b[0], b[3], b[8], b[9] = 0x45, 40, 64, unix.IPPROTO_TCP
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	tcp := b[20:]
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	binary.BigEndian.PutUint32(tcp[4:], s.seq)
	binary.BigEndian.PutUint32(tcp[8:], s.ack)
	tcp[12], tcp[13], tcp[14] = 5<<4, s.flags, 0x20
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for i := 12; i < len(b); i += 2 { // the sum includes the addresses
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if s.wrong {
		sum ^= 1
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	if s.fragment {
		b[6] = 0x20
	}
	return b
}

// becomes waits for a state of a flow.
func becomes(t *testing.T, f *DataPath, k Key, what string, is func(Flow) bool) {
	t.Helper()
	nstest.Eventually(t, func() error {
		fl, err := f.Flow(k)
		if err == nil && is(fl) {
			return nil
		}
		return fmt.Errorf("%+v, %v: want it %s", fl, err, what)
	})
}

// stays checks that a flow is not forgotten as an ended one.
func stays(t *testing.T, f *DataPath, k Key) {
	t.Helper()
	if n, err := f.Forget(0, time.Hour); n != 0 || err != nil {
		t.Errorf("%d forgotten, %v", n, err)
	}
	if _, err := f.Flow(k); err != nil {
		t.Error(err)
	}
}

// TestReopened checks that a client reconnecting from the same port before the flow is forgotten
// has a live flow at the same host.
func TestReopened(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	c, k, owner, _ := session(t, sc)
	if _, err := f.Change(k, func(fl *Flow) { fl.Epoch = 6 }); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.Close() // by a reset
	becomes(t, f, k, "ended", func(fl Flow) bool { return fl.Ended })
	do(t, sc.client, func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(k.Client), Timeout: patience}
		c, err = d.Dial("tcp", service4.String())
		return err
	})
	defer c.Close()
	if _, err := ask(c, "b", patience); err != nil {
		t.Fatal(err)
	}
	becomes(t, f, k, "alive", func(fl Flow) bool { return !fl.Ended && fl.Owner == owner && fl.Epoch == 6 })
	stays(t, f, k)
}

// TestReopenedByClient checks that the SYN alone revives a flow closed by both sides, before the
// host answers. The host may still know the connection.
func TestReopenedByClient(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	_, k, _, _ := session(t, sc)
	change(t, f, k, func(v *bpf.LBLbFlow) { v.Flags = flow.FinIn | flow.FinOut })
	forge(t, sc, k.Client, service4, tcpSYN) // an odd one: the host answers with an ACK alone
	becomes(t, f, k, "alive", func(fl Flow) bool { return !fl.Ended })
	stays(t, f, k)
}

// TestForgedReset checks that a forged reset does not end a flow whose host continues.
func TestForgedReset(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	c, k, _, _ := session(t, sc)
	forge(t, sc, k.Client, service4, tcpRST)
	becomes(t, f, k, "ended", func(fl Flow) bool { return fl.Ended })
	if _, err := ask(c, "b", patience); err != nil {
		t.Fatal(err)
	}
	becomes(t, f, k, "alive", func(fl Flow) bool { return !fl.Ended })
	stays(t, f, k)
}

// change edits a flow's entry in the data path.
func change(t *testing.T, f *DataPath, k Key, to func(*bpf.LBLbFlow)) {
	t.Helper()
	var v bpf.LBLbFlow
	if err := f.maps.LbFlows.Lookup(k.Raw(), &v); err != nil {
		t.Fatal(err)
	}
	to(&v)
	if err := f.maps.LbFlows.Put(k.Raw(), v); err != nil {
		t.Fatal(err)
	}
}

// TestForgetsFlood checks that flows of a SYN flood with the hosts' answers are forgotten soon, and
// an opened silent connection stays.
func TestForgetsFlood(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	_, opened, _, _ := session(t, sc)
	from := netip.MustParseAddrPort("10.1.0.77:5555") // nobody's
	spoofed := Key{Client: from}
	forge(t, sc, from, service4, tcpSYN)
	becomes(t, f, spoofed, "answered", func(fl Flow) bool { return fl.Out > 0 && fl.Opening })
	forge(t, sc, from, service4, tcpSYN)
	becomes(t, f, spoofed, "no less open for a second SYN", func(fl Flow) bool { return fl.In > 1 && fl.Opening })
	if n, err := f.Forget(0, time.Hour); n != 0 || err != nil {
		t.Errorf("at once %d are forgotten, %v", n, err)
	}
	change(t, f, opened, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
	stays(t, f, opened)
	for end := time.Now().Add(patience); ; { // each repeated answer of the host updates the flow's time
		change(t, f, spoofed, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
		if n, err := f.Forget(0, time.Hour); n == 1 && err == nil {
			break
		} else if err != nil || time.Now().After(end) {
			t.Fatalf("%d are forgotten, %v: want the one that was never opened", n, err)
		}
	}
	if fl, err := f.Flow(opened); err != nil || fl.Opening {
		t.Errorf("%+v, %v", fl, err)
	}
}

// TestOpensByACK checks that a client without the backend's answer cannot open a connection. The
// backend drops or resets its forged segments.
func TestOpensByACK(t *testing.T) {
	sc := newScene(t)
	serve(t, sc.hosts, service4)
	from := netip.MustParseAddrPort("10.1.0.77:5555") // nobody's
	k := Key{Client: from}
	forge(t, sc, from, service4, tcpSYN)
	becomes(t, sc.f, k, "answered", func(fl Flow) bool { return fl.Out > 0 && fl.Opening })
	for i, flags := range []byte{0, tcpFIN, tcpRST} {
		forge(t, sc, from, service4, flags)
		becomes(t, sc.f, k, fmt.Sprintf("never opened, after flags %d", flags), func(fl Flow) bool { return fl.In == uint64(2+i) && fl.Opening })
	}
	sc.resetsACK(t, k)
}

// nobody routes packets for an address into the client's network without a receiver, so the backend
// gets no error.
func (s *scene) nobody(t *testing.T, at netip.Addr) {
	t.Helper()
	do(t, s.middle, func() error {
		l, err := netlink.LinkByName("c")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: at.AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 77}})
	})
}

// TestOpensByACKRepeated checks that a backend's repeated answer to a SYN after its reset of a
// forged ACK opens nothing. This holds for either order of SYN and ACK, and if the flow was
// forgotten in between.
func TestOpensByACKRepeated(t *testing.T) {
	sc := newScene(t)
	serve(t, sc.hosts, service4)
	sc.nobody(t, netip.MustParseAddr("10.1.0.77"))
	key := func(port uint16) Key { return Key{Client: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.77"), port)} }
	sends := func(k Key, flags byte, what string, is func(Flow) bool) {
		t.Helper()
		forge(t, sc, k.Client, service4, flags)
		becomes(t, sc.f, k, what, is)
	}
	answered := func(fl Flow) bool { return fl.Out > 0 }
	synFirst, ackFirst, forgotten, unheard := key(1), key(2), key(3), key(4)
	sends(synFirst, tcpSYN, "answered", answered)
	sends(forgotten, tcpSYN, "answered", answered)
	if err := sc.f.maps.LbFlows.Delete(forgotten.Raw()); err != nil {
		t.Fatal(err)
	}
	before := map[Key]uint64{forgotten: 0, synFirst: sc.resetsACK(t, synFirst).Out, ackFirst: sc.resetsACK(t, ackFirst).Out}
	sends(ackFirst, tcpSYN, "opened", func(fl Flow) bool { return !fl.Ended && fl.Out > before[ackFirst] })
	for k, out := range before {
		becomes(t, sc.f, k, "answered again", func(fl Flow) bool { return !fl.Ended && fl.Out > out })
		if fl, err := sc.f.Flow(k); err != nil || !fl.Opening || !fl.Never(k) {
			t.Errorf("from port %d: %+v, %v: want it never opened", k.Client.Port(), fl, err)
		}
	}
	if err := sc.f.maps.LbFlows.Put(unheard.Raw(), bpf.LBLbFlow{Word: 1, Seen: kernel.Monotonic(), In: 1}); err != nil {
		t.Fatal(err) // as by an ACK dropped by a firewall
	}
	sends(unheard, tcpSYN, "never opened", func(fl Flow) bool { return fl.In == 2 && fl.Opening })
	for what, v := range map[string]bpf.LBLbFlow{"told": {Word: 1, Flags: flow.Told}, "has moved": {Word: 1 | 1<<flow.EpochAt}, "heard": {Word: 1, Out: 1}} {
		v.Seen, v.In = kernel.Monotonic(), 1
		if err := sc.f.maps.LbFlows.Put(unheard.Raw(), v); err != nil {
			t.Fatal(err)
		}
		sends(unheard, tcpSYN, what+", and no less open", func(fl Flow) bool { return fl.In == 2 && !fl.Opening })
	}
}

// TestOpensAfterReset checks that a client can open a connection after the reset of an earlier SYN
// by a host without a server.
func TestOpensAfterReset(t *testing.T) {
	sc := newScene(t)
	k := Key{Client: netip.MustParseAddrPort("10.1.0.2:5555")}
	if err := <-sc.begin(t, k); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatal(err)
	}
	becomes(t, sc.f, k, "reset", func(fl Flow) bool { return fl.Ended && fl.Reset && fl.Never(k) })
	serve(t, sc.hosts, service4)
	if err := <-sc.begin(t, k); err != nil {
		t.Fatal(err)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Opening || fl.Never(k) {
		t.Errorf("%+v, %v: want it opened", fl, err)
	}
}

// TestOpensByData checks that a connection opens by its backend's pushed data, if the client's
// packets pass another load balancer. Other packets of the backend could be answers to forged ones.
func TestOpensByData(t *testing.T) {
	sc := newScene(t)
	sc.nobody(t, netip.MustParseAddr("10.1.0.77"))
	k := Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")}
	for i, flags := range []byte{tcpSYN | tcpACK, tcpACK, tcpPSH | tcpSYN, tcpPSH | tcpACK} {
		forge(t, &scene{client: sc.hosts[0]}, service4, k.Client, flags)
		becomes(t, sc.f, k, fmt.Sprintf("open by data alone, after flags %d", flags), func(fl Flow) bool {
			return fl.Owner == 1 && fl.Out == uint64(1+i) && fl.Opening == (flags != tcpPSH|tcpACK)
		})
	}
}

// resetsACK sends forged ACKs until the backend's reset is its latest packet. The backend also
// repeats its answer to a SYN.
func (s *scene) resetsACK(t *testing.T, k Key) (fl Flow) {
	t.Helper()
	nstest.Eventually(t, func() (err error) {
		forge(t, s, k.Client, service4, tcpACK)
		if fl, err = s.f.Flow(k); err != nil || !fl.Ended || !fl.Reset {
			err = fmt.Errorf("%+v, %v: want it reset by its backend", fl, err)
		}
		return err
	})
	return fl
}

// TestForgetsFloodBalanced checks that a flood is forgotten as soon when the data path reassigns
// it, because a backend is unwell or removed. A moved flow stays.
func TestForgetsFloodBalanced(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	for _, ns := range sc.hosts { // nobody answers
		down(t, ns, "w0")
	}
	k := Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")}
	all := f.backends
	for name, c := range map[string]struct {
		flags byte
		make  func(owner int)
	}{
		"not well": {tcpSYN, func(owner int) { sc.unwell(t, all[owner].Number) }},
		"removed": {tcpACK, func(owner int) {
			if err := errors.Join(f.SetBackends([]Backend{all[1-owner]}), f.removeBackend(all[owner].Number)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		if err := f.SetBackends(all); err != nil {
			t.Fatal(err)
		}
		forge(t, sc, k.Client, service4, c.flags)
		becomes(t, f, k, "known", func(fl Flow) bool { return fl.Epoch == 0 })
		fl, err := f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		c.make(int(fl.Owner) - 1)
		change(t, f, k, func(v *bpf.LBLbFlow) { v.Seen -= uint64(2 * time.Second) })
		forge(t, sc, k.Client, service4, c.flags)
		becomes(t, f, k, name+": balanced", func(now Flow) bool { return now.Epoch == 1 && now.Owner == 3-fl.Owner })
		moved := k
		moved.Client = netip.AddrPortFrom(k.Client.Addr(), 6666)
		copyFlow(t, f, k, moved)
		if fl, err := f.Change(moved, func(fl *Flow) { fl.Owner, fl.Epoch, fl.Predecessor = 3-fl.Owner, 2, fl.Owner }); err != nil || fl.Epoch != 2 {
			t.Fatalf("%+v, %v", fl, err)
		}
		if fl, err := f.Flow(moved); err != nil || fl.Opening || fl.Unanswered || fl.Balanced || fl.Until == 0 || since(fl.Until) > patience {
			t.Errorf("%s: %+v, %v: want one that has moved now", name, fl, err)
		}
		for _, k := range []Key{k, moved} {
			change(t, f, k, func(v *bpf.LBLbFlow) { v.Seen = 1 })
		}
		nstest.Eventually(t, func() error { // delayed on a machine that has just booted
			if n, err := f.Forget(0, math.MaxInt64); n != 1 || err != nil {
				return fmt.Errorf("%s: %d are forgotten, %v: want the one that was never opened", name, n, err)
			}
			return nil
		})
		if _, err := f.Flow(moved); err != nil {
			t.Errorf("%s: one that has moved: %v", name, err)
		}
		if err := f.maps.LbFlows.Delete(moved.Raw()); err != nil {
			t.Fatal(err)
		}
	}
}

// copyFlow copies a flow's entry to another key.
func copyFlow(t *testing.T, f *DataPath, from, to Key) {
	t.Helper()
	var v bpf.LBLbFlow
	if err := errors.Join(f.maps.LbFlows.Lookup(from.Raw(), &v), f.maps.LbFlows.Put(to.Raw(), &v)); err != nil {
		t.Fatal(err)
	}
}

// TestResetByBackend checks that a backend's reset is distinguished from a client's until the
// client continues.
func TestResetByBackend(t *testing.T) {
	sc := newScene(t)
	c, k, owner, other := session(t, sc)
	sc.isReset(t, k)
	becomes(t, sc.f, k, "ended by the client", func(fl Flow) bool { return !fl.Reset })
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Word = uint64(other) }) // without a session there
	if got, err := ask(c, "b", patience); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("%q, %v: want a reset by backend %d instead of %d", got, err, other, owner)
	}
	becomes(t, sc.f, k, "ended by the backend", func(fl Flow) bool { return fl.Ended && fl.Reset && !fl.ClientReset })
	down(t, sc.hosts[other-1], "w0")
	forge(t, sc, k.Client, service4, tcpACK)
	becomes(t, sc.f, k, "ended, and the client goes on", func(fl Flow) bool { return fl.Ended && !fl.Reset && !fl.ClientReset })
	forge(t, sc, k.Client, service4, tcpSYN)
	becomes(t, sc.f, k, "opened anew", func(fl Flow) bool { return !fl.Ended })
	forge(t, sc, k.Client, service4, tcpRST)
	becomes(t, sc.f, k, "ended by the client again", func(fl Flow) bool { return fl.ClientReset })
}

// locker calls before ahead of each Lock.
type locker struct {
	sync.Mutex
	before func()
}

func (l *locker) Lock() { l.before(); l.Mutex.Lock() }

// TestForgetsNoMove checks that a flow stays if a move or a packet arrives after it was found too
// old.
func TestForgetsNoMove(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	_, k, _, other := session(t, sc)
	for what, begins := range map[string]func(*bpf.LBLbFlow){
		"move":   func(v *bpf.LBLbFlow) { v.Word |= uint64(other) << flow.ToAt },
		"packet": func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() },
	} {
		was := bpf.LBLbFlow{}
		change(t, f, k, func(v *bpf.LBLbFlow) { v.Seen = 1; was = *v })
		n, err := f.forget(time.Hour, time.Second, &locker{before: func() { change(t, f, k, begins) }}, newCensus())
		if n != 0 || err != nil {
			t.Errorf("%s: %d are forgotten, %v", what, n, err)
		}
		if err := f.maps.LbFlows.Put(k.Raw(), was); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := f.Forget(time.Hour, time.Second); n != 1 || err != nil {
		t.Errorf("and then %d, %v", n, err)
	}
}
