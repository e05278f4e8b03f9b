// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/nstest"
)

// forwards sets forwarding on the daemon's host.
func (s *side) forwards(on string) {
	s.Helper()
	err := s.there.Do(func() error {
		for _, f := range []string{"ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+f, []byte(on), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.Fatal(err)
	}
}

// bad reports the probe byte of the link state.
func (s *side) bad() bool {
	s.Helper()
	var w links.State
	if err := s.e.maps[links.MapName].Lookup(links.Slot(s.index), &w); err != nil {
		s.Fatal(err)
	}
	return w.Reasons()&links.Probe != 0
}

// Echo returns by the neighbour's forwarding, independent of its bfdd. A link without returning echo is not used,
// even if control packets pass.
func TestEchoWithBFDD(t *testing.T) {
	frrtest.Need(t, "bfdd")
	for name, addr := range map[string][2]string{"IPv4": {"10.9.0.1", "10.9.0.2"}, "IPv6": {"fd09::1", "fd09::2"}} {
		t.Run(name, func(t *testing.T) {
			s := newSide(t)
			s.forwards("1")
			frr := frrtest.Start(t, s.there, "far", map[string]string{"bfdd": "bfd\n peer " + addr[0] + " local-address " + addr[1] + ` interface w0
  detect-multiplier 125
  receive-interval 40
  transmit-interval 40
  echo receive-interval 20
 exit
`})
			x := s.session(1, addr[0], addr[1])
			x.Multiplier, x.Echo, x.Link = 50, 10*time.Millisecond, s.index
			s.put(x)
			s.up(true, x)
			s.agree(x)
			returned := func() uint64 { return s.status(x).Echo.Returned }
			more := func(what string) {
				t.Helper()
				before := returned()
				nstest.Until(s, what, func() bool { return returned() > before+20 })
			}
			more("echo comes back")
			if e := s.status(x).Echo; e.Interval != 20*time.Millisecond || e.RTT <= 0 || e.RTT > time.Second || e.Failed || e.Refused != 0 {
				t.Errorf("%+v", e)
			}
			// bfdd is down after five seconds. If this host stalls for as long, the time may be over too soon.
			for tries := 1; ; tries++ {
				before := returned()
				frr.Signal("bfdd", syscall.SIGSTOP)
				_ = nstest.Poll(3*time.Second, func() error {
					if returned() <= before+20 {
						return errors.New("echo does not come back")
					}
					return nil
				})
				frr.Signal("bfdd", syscall.SIGCONT)
				if returned() > before+20 {
					break
				}
				if tries == 5 {
					t.Fatalf("echo does not come back while bfdd is stopped: %+v", s.status(x))
				}
				s.up(true, x)
				s.agree(x)
			}
			s.up(true, x)
			s.agree(x)
			more("echo comes back again")

			l := s.cut()
			s.up(false, x)
			if st := s.status(x); st.Diag != bfd.EchoFailed || !st.Echo.Failed {
				t.Errorf("%+v", st)
			}
			nstest.Until(s, "the link is bad", s.bad)
			l.Close()
			s.up(true, x)
			nstest.Until(s, "the link is good", func() bool { return !s.bad() })

			s.agree(x)
			more("echo comes back before forwarding ends")
			s.forwards("0")
			nstest.Until(s, "echo fails", func() bool { return s.status(x).Echo.Failed && s.bad() })
			s.up(true, x) // up by control packets
			s.agree(x)
			if !s.bad() || !s.status(x).Echo.Failed {
				t.Errorf("the link is good: %+v", s.status(x))
			}
			s.forwards("1")
			nstest.Until(s, "the link is good again", func() bool { return !s.bad() && !s.status(x).Echo.Failed })
			// An unwanted echo function stops and has no effect.
			x.Echo = 0
			s.put(x)
			if e := s.status(x).Echo; e != (Echo{}) {
				t.Errorf("%+v", e)
			}
		})
	}
}

// Echo packets of a neighbour return by this host's forwarding and bypass the programs. bfdd counts as many returned
// as sent.
func TestEchoOfBFDD(t *testing.T) {
	frrtest.Need(t, "bfdd")
	s := newSide(t)
	s.forwards("1")
	if err := s.here.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/all/forwarding", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	frr := frrtest.Start(t, s.there, "far", map[string]string{"bfdd": `bfd
 peer 10.9.0.1 local-address 10.9.0.2 interface w0
  detect-multiplier 125
  receive-interval 40
  transmit-interval 40
  echo-mode
  echo transmit-interval 50
  echo receive-interval 20
 exit
`})
	x := s.session(1, "10.9.0.1", "10.9.0.2")
	x.Echo, x.EchoRx = 20*time.Millisecond, 50*time.Millisecond
	s.put(x)
	s.up(true, x)
	nstest.Until(s, "echo comes back both ways", func() bool {
		var in, out int
		for line := range strings.Lines(frr.Vtysh("show bfd peers counters")) {
			_, _ = fmt.Sscanf(strings.TrimSpace(line), "Echo packet input: %d packets", &in)
			_, _ = fmt.Sscanf(strings.TrimSpace(line), "Echo packet output: %d packets", &out)
		}
		e := s.status(x).Echo
		return in > 20 && in >= out-5 && e.Returned > 20 && e.Returned >= e.Sent-5
	})
}

// On the echo port only awaited packets count; foreign packets pass.
func TestEchoRefused(t *testing.T) {
	const pass, taken, shift = -1, 2, 34 + 8 // TC_ACT_UNSPEC, TC_ACT_SHOT, offset of the packet
	b := newBench(t)
	s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: 10 * time.Millisecond, RequiredRx: 10 * time.Millisecond},
		Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000, Echo: 5 * time.Millisecond}
	if err := b.w.put(0, s, 1); err != nil {
		t.Fatal(err)
	}
	p := bfdtest.Packet{State: bfd.Init, Multiplier: 3, Mine: 5, Yours: s.Discriminator, DesiredTx: 10 * time.Millisecond, RequiredRx: 10 * time.Millisecond,
		EchoRx: time.Millisecond, Final: true}
	// step is a tick with a packet from the neighbour. It returns the echo packet sent, if any.
	step := func() (echo []byte) {
		b.now += 5 * time.Millisecond
		b.at(0)
		b.receive(frame(peer4, local4, bfdtest.HopLimit, p.Append(nil)))
		b.tick()
		p.State = bfd.Up
		for f := b.sent(); f != nil; f = b.sent() {
			if binary.BigEndian.Uint16(f[36:]) == 3785 {
				echo = f
			}
		}
		return echo
	}
	state := func() Status {
		st, _, err := b.w.status(0)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	var echo []byte
	for range 5 {
		if echo = step(); echo != nil {
			break
		}
	}
	if echo == nil || string(echo[26:30]) != string(echo[30:34]) || echo[22] != 255 {
		t.Fatalf("%x", echo)
	}
	back := func(change func(f []byte)) int32 {
		f := append([]byte{}, echo...)
		f[22] = 254
		change(f)
		return b.receive(f)
	}
	for name, c := range map[string]struct {
		change  func(f []byte)
		verdict int32
		refused uint64
	}{
		"by nobody who forwarded it": {func(f []byte) { f[22] = 255 }, pass, 0},
		"from two hops away":         {func(f []byte) { f[22] = 253 }, pass, 0},
		"the neighbour's own":        {func(f []byte) { copy(f[26:], peer4.AsSlice()); copy(f[30:], peer4.AsSlice()) }, pass, 0},
		"from another":               {func(f []byte) { copy(f[26:], peer4.AsSlice()) }, pass, 0},
		"of no session":              {func(f []byte) { f[shift+4]++ }, pass, 0},
		"another number":             {func(f []byte) { f[shift+20]++ }, taken, 1},
		"not sent yet":               {func(f []byte) { binary.BigEndian.PutUint32(f[shift+8:], 1000) }, taken, 1},
		"something else":             {func(f []byte) { f[shift]++ }, taken, 1},
	} {
		before := state().Echo
		if v := back(c.change); v != c.verdict {
			t.Errorf("%s: verdict %d, want %d", name, v, c.verdict)
		}
		if e := state().Echo; e.Returned != before.Returned || e.Refused != before.Refused+c.refused {
			t.Errorf("%s: %+v", name, e)
		}
	}
	// Echo packets that never returned cause no verdict.
	for range 10 {
		echo = step()
	}
	if st := state(); st.State != bfd.Up || st.Echo.Sent < 5 {
		t.Fatalf("%+v", st)
	}
	if v := back(func([]byte) {}); v != taken || state().Echo.Returned != 1 {
		t.Fatalf("%d, %+v", v, state())
	}
	// After the first return they do: after multiplier losses and not sooner, and not while this host may be the
	// cause.
	for n := 1; n <= 3; n++ {
		step()
		if st := state(); st.State != bfd.Up {
			t.Fatalf("after %d: %+v", n, st)
		}
	}
	if err := b.o.LivenessShared.Put(uint32(0), uint64(b.now+4*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	step()
	if st := state(); st.State != bfd.Up {
		t.Fatalf("while this host stands still: %+v", st)
	}
	for range 4 {
		step()
	}
	if st := state(); st.Diag != bfd.EchoFailed || !st.Echo.Failed || st.Echo.Failures != 1 || st.Downs != 1 {
		t.Errorf("%+v", st)
	}
}
