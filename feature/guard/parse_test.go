// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/weir-project/weir/internal/guardstate"
	"golang.org/x/sys/unix"
)

// frameOf returns an Ethernet frame of an IP packet.
func frameOf(ethertype uint16, tags []uint16, packet ...[]byte) []byte {
	b := make([]byte, 12, 128)
	for _, t := range tags {
		b = binary.BigEndian.AppendUint16(b, t)
		b = binary.BigEndian.AppendUint16(b, 7) // VLAN 7
	}
	b = binary.BigEndian.AppendUint16(b, ethertype)
	for _, p := range packet {
		b = append(b, p...)
	}
	return b
}

// ip4 returns an IPv4 header with the given number of option words, for n following bytes.
func ip4(proto byte, options, fragment, n int) []byte {
	b := make([]byte, 20+4*options)
	b[0] = 0x40 | byte(5+options)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+n))
	binary.BigEndian.PutUint16(b[6:], uint16(fragment))
	b[8], b[9] = 64, proto
	copy(b[12:], []byte{192, 0, 2, 7})
	copy(b[16:], []byte{10, 77, 0, 2})
	for i := 20; i < len(b); i++ {
		b[i] = 1 // no operation
	}
	return b
}

func ip6(next byte, n int) []byte {
	b := make([]byte, 40)
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(n))
	b[6], b[7] = next, 64
	copy(b[8:], netip.MustParseAddr("2001:db8::7").AsSlice())
	copy(b[24:], netip.MustParseAddr("fd00::2").AsSlice())
	return b
}

// extension returns an IPv6 extension header of the given size, a multiple of 8 (4 for an
// authentication header).
func extension(kind, next byte, size int) []byte {
	b := make([]byte, size)
	b[0] = next
	switch kind {
	case unix.IPPROTO_AH:
		b[1] = byte(size/4 - 2)
	case unix.IPPROTO_FRAGMENT:
	default:
		b[1] = byte(size/8 - 1)
	}
	return b
}

func udpTo(port uint16) []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint16(b, 5000)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], 12)
	return b
}

const (
	v4type = unix.ETH_P_IP
	v6type = unix.ETH_P_IPV6
	dot1q  = unix.ETH_P_8021Q
	dot1ad = unix.ETH_P_8021AD
)

// Possible outcomes for a packet at an exhausted limit.
const (
	charged = "charged" // belongs to the guard: refused, like every further one
	refused = "refused" // refused as malformed
	dropped = "dropped" // dropped for all guards, and not counted
	passes  = "passes"  // not guarded
	never_  = ""        // never at this hook
)

// TestVerdicts has the table of outcomes at each hook.
func TestVerdicts(t *testing.T) {
	need(t)
	u := udpTo(443)
	later := ip4(unix.IPPROTO_UDP, 0, 0x00b9, 12)
	chain := func(n int) [][]byte {
		out := [][]byte{ip6(unix.IPPROTO_DSTOPTS, n*8+12)}
		for i := range n {
			next := byte(unix.IPPROTO_DSTOPTS)
			if i == n-1 {
				next = unix.IPPROTO_UDP
			}
			out = append(out, extension(unix.IPPROTO_DSTOPTS, next, 8))
		}
		return append(out, u)
	}
	guards := simulations{}
	for _, c := range []struct {
		name                string
		frame               []byte
		socket, cgroup, xdp string
	}{
		{"IPv4", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 0, 0, 12), u), charged, charged, charged},
		{"IPv4 with options", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 10, 0, 12), u), charged, charged, charged},
		{"IPv4, another port", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 0, 0, 12), udpTo(444)), charged, passes, passes},
		{"IPv4, UDP-Lite", frameOf(v4type, nil, ip4(unix.IPPROTO_UDPLITE, 0, 0, 12), u), charged, passes, passes},
		{"IPv4, TCP", frameOf(v4type, nil, ip4(unix.IPPROTO_TCP, 0, 0, 20), make([]byte, 20)), passes, passes, passes},
		{"IPv4, first fragment", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 0, 0x2000, 12), u), charged, charged, charged},
		{"IPv4, later fragment", frameOf(v4type, nil, later, u), never_, never_, charged},
		{"IPv4, header of 16 bytes", frameOf(v4type, nil, func() []byte { b := ip4(unix.IPPROTO_UDP, 0, 0, 12); b[0] = 0x44; return b }(), u), refused, passes, passes},
		{"IPv4, cut off in UDP", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 0, 0, 12), u[:7]), refused, passes, passes},
		{"IPv4, cut off in options", frameOf(v4type, nil, ip4(unix.IPPROTO_UDP, 4, 0, 12)[:32]), refused, passes, passes},
		{"IPv4 behind a VLAN tag", frameOf(v4type, []uint16{dot1q}, ip4(unix.IPPROTO_UDP, 0, 0, 12), u), never_, never_, charged},
		{"IPv4 behind two tags", frameOf(v4type, []uint16{dot1ad, dot1q}, ip4(unix.IPPROTO_UDP, 0, 0, 12), u), never_, never_, charged},
		{"IPv4 behind three tags", frameOf(v4type, []uint16{dot1ad, dot1q, dot1q}, ip4(unix.IPPROTO_UDP, 0, 0, 12), u), never_, never_, charged},
		{"IPv4 behind 34 tags", frameOf(v4type, slices.Repeat([]uint16{dot1q}, 34), ip4(unix.IPPROTO_UDP, 0, 0, 12), u), never_, never_, charged},
		{"IPv4 behind 35 tags", frameOf(v4type, slices.Repeat([]uint16{dot1q}, 35), ip4(unix.IPPROTO_UDP, 0, 0, 12), u), never_, never_, dropped},
		{"ARP", frameOf(unix.ETH_P_ARP, nil, make([]byte, 50)), never_, never_, passes},
		{"IPv6", frameOf(v6type, nil, ip6(unix.IPPROTO_UDP, 12), u), charged, charged, charged},
		{"IPv6, hop-by-hop", frameOf(v6type, nil, ip6(unix.IPPROTO_HOPOPTS, 28), extension(0, unix.IPPROTO_UDP, 16), u), charged, charged, charged},
		{"IPv6, routing and AH", frameOf(v6type, nil, ip6(unix.IPPROTO_ROUTING, 60), extension(unix.IPPROTO_ROUTING, unix.IPPROTO_AH, 24),
			extension(unix.IPPROTO_AH, unix.IPPROTO_UDP, 24), u), charged, charged, charged},
		{"IPv6, 9 extension headers", frameOf(v6type, nil, chain(9)...), charged, charged, charged},
		{"IPv6, 32 extension headers", frameOf(v6type, nil, chain(32)...), charged, charged, charged},
		{"IPv6, 33 extension headers", frameOf(v6type, nil, chain(33)...), refused, refused, refused},
		{"IPv6, first fragment", frameOf(v6type, nil, ip6(unix.IPPROTO_FRAGMENT, 20), []byte{17, 0, 0, 1, 0, 0, 0, 1}, u), charged, charged, charged},
		{"IPv6, later fragment", frameOf(v6type, nil, ip6(unix.IPPROTO_FRAGMENT, 20), []byte{17, 0, 5, 0xa8, 0, 0, 0, 1}, u), never_, never_, charged},
		{"IPv6, later fragment of destination options", frameOf(v6type, nil, ip6(unix.IPPROTO_FRAGMENT, 20), []byte{60, 0, 5, 0xa8, 0, 0, 0, 1}, u), never_, never_, charged},
		{"IPv6, later fragment of AH", frameOf(v6type, nil, ip6(unix.IPPROTO_FRAGMENT, 20), []byte{51, 0, 5, 0xa8, 0, 0, 0, 1}, u), never_, never_, charged},
		{"IPv6, later fragment of TCP", frameOf(v6type, nil, ip6(unix.IPPROTO_FRAGMENT, 20), []byte{6, 0, 5, 0xa8, 0, 0, 0, 1}, u), never_, never_, passes},
		{"IPv6, cut off in an extension", frameOf(v6type, nil, ip6(unix.IPPROTO_HOPOPTS, 28), extension(0, unix.IPPROTO_UDP, 64)[:10]), refused, passes, passes},
		{"IPv6, TCP", frameOf(v6type, nil, ip6(unix.IPPROTO_TCP, 20), make([]byte, 20)), passes, passes, passes},
		{"IPv6, no next header", frameOf(v6type, nil, ip6(unix.IPPROTO_NONE, 12), u), passes, passes, passes},
	} {
		for h, want := range map[Hook]string{Socket: c.socket, Cgroup: c.cgroup, XDP: c.xdp} {
			if want == never_ {
				continue
			}
			s := guards.of(t, h, c.frame)
			t.Run(c.name+" at "+h.String(), func(t *testing.T) { verdict(t, s, c.frame, want) })
		}
	}
}

// simulations are guards with a limit of 1 pps, by hook and type of frame. Loading one takes longer
// than all its packets.
type simulations map[[2]uint16]*Simulation

// of returns the guard for a frame, with its state reset.
func (all simulations) of(t *testing.T, h Hook, frame []byte) *Simulation {
	t.Helper()
	family := uint16(v4type)
	to := netip.MustParseAddrPort("10.77.0.2:443")
	if binary.BigEndian.Uint16(frame[12:]) == v6type {
		family, to = v6type, netip.MustParseAddrPort("[fd00::2]:443")
	}
	k := [2]uint16{uint16(h), family}
	if all[k] == nil {
		s, err := Simulate(h, Limits{Total: 1}, to, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		all[k] = s
	}
	st := all[k].state
	was := st.Total
	*st.Layout = guardstate.Layout{}
	st.Total.Seed, st.Total.Active, st.Total.Version, st.Total.Limits, st.Total.Hot = was.Seed, was.Active, was.Version, was.Limits, guardstate.Never
	return all[k]
}

// verdict sends a packet 20 times at one instant, to a guard with room for eight.
func verdict(t *testing.T, s *Simulation, frame []byte, want string) {
	passed := 0
	for range 20 {
		ok, err := s.Passes(1<<40, frame)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			passed++
		}
	}
	c := s.Counts(1 << 40)
	got := passes
	switch {
	case passed == 0 && c.Malformed == 20:
		got = refused
	case passed == 0 && c.Refused == 0:
		got = dropped
	case passed > 0 && passed <= 8 && c.Refused == uint64(20-passed) && c.Passed == uint64(passed):
		got = charged
	case passed != 20 || c.Passed+c.Refused != 0:
		t.Fatalf("%d of 20 passed, counted %+v", passed, c)
	}
	if got != want {
		t.Errorf("the reason is %s, want %s (%d of 20 passed)", got, want, passed)
	}
}
