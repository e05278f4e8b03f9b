// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
)

// rerouted returns a packet expected from a shape, composed here by hand.
func rerouted(s shape, ip []byte) []byte {
	in := forwarded(ip)
	list := func(all []string) (out []byte) {
		for i := len(all) - 1; i >= 0; i-- {
			out = append(out, netip.MustParseAddr(all[i]).AsSlice()...)
		}
		return out
	}
	six := ip[0]>>4 == 6
	if s.inline && six {
		n := len(s.segments)
		out := bytes.Clone(in[:40])
		out[6] = unix.IPPROTO_ROUTING
		copy(out[24:], netip.MustParseAddr(s.segments[0]).AsSlice())
		out = append(out, in[6], byte(2*n), 4, byte(n), byte(n-1), 0, 0, 0)
		out = append(out, in[24:40]...) // the last one to visit comes first
		out = append(append(out, list(s.segments[1:])...), in[40:]...)
		binary.BigEndian.PutUint16(out[4:], uint16(len(out)-40))
		return out
	}
	segments, next := s.segments, byte(unix.IPPROTO_IPV6)
	first := binary.BigEndian.Uint32(in)
	if !six {
		next, first = unix.IPPROTO_IPIP, 6<<28|uint32(in[1])<<20
		if s.inline {
			segments = []string{sidVia, sidOut}
		}
	}
	if first&0xfffff == 0 {
		first |= 77
	}
	out := append(binary.BigEndian.AppendUint32(nil, first), 0, 0, next, 64)
	out = append(out, netip.MustParseAddr("fc00:1::1").AsSlice()...)
	out = append(out, netip.MustParseAddr(segments[0]).AsSlice()...)
	if n := len(segments) - 1; n > 0 {
		out[6] = unix.IPPROTO_ROUTING
		out = append(out, next, byte(2*n), 4, byte(n), byte(n-1), 0, 0, 0)
		out = append(out, list(segments[1:])...)
	}
	out = append(out, in...)
	binary.BigEndian.PutUint16(out[4:], uint16(len(out)-40))
	return out
}

// check accepts the expected packet. It rejects a flip of any bit, except in a generated flow label.
func TestCheckFindsDamage(t *testing.T) {
	c := &catcher{x: &experiment{env: &lab.Env{Rand: rand.New(rand.NewPCG(1, 2))}}}
	for _, s := range shapes {
		for i := range 4 {
			for _, p := range c.packets(i) {
				right := rerouted(s, p.ip)
				if err := s.check(right, p); err != nil {
					t.Fatalf("%s, %s: %v", s.name, p.what, err)
				}
				if err := s.check(right[:len(right)-1], p); err == nil {
					t.Errorf("%s, %s: missing last byte not detected", s.name, p.what)
				}
				made := !s.inline || p.ip[0]>>4 == 4
				made = made && p.what != "IPv6 with a flow label"
				for at := range right {
					wrong := bytes.Clone(right)
					wrong[at] ^= 0x20 >> (at % 5)
					if made && (at == 1 && wrong[1]>>4 == right[1]>>4 || at == 2 || at == 3) {
						continue
					}
					if err := s.check(wrong, p); err == nil {
						t.Errorf("%s, %s: wrong byte %d of %d not detected", s.name, p.what, at, len(right))
					}
				}
			}
		}
	}
}

// Checksums of sent packets are right: the sum over all is all ones.
func TestSamples(t *testing.T) {
	c := &catcher{x: &experiment{env: &lab.Env{Rand: rand.New(rand.NewPCG(3, 4))}}}
	for i := range 9 {
		for _, p := range c.packets(i) {
			var addrs, udp []byte
			switch p.what {
			case "IPv4":
				addrs, udp = p.ip[12:20], p.ip[20:]
				if checksumOf(p.ip[:20]) != 0xffff {
					t.Errorf("%s: header checksum", p.what)
				}
			case "IPv6 with options", "IPv6 fragment":
				addrs, udp = p.ip[8:40], p.ip[48:]
			default:
				addrs, udp = p.ip[8:40], p.ip[40:]
			}
			want := binary.BigEndian.Uint16(udp[6:])
			udp = bytes.Clone(udp)
			udp[6], udp[7] = 0, 0
			if got := checksum(addrs, udp, unix.IPPROTO_UDP); got != want {
				t.Errorf("%s: checksum %#x, want %#x", p.what, want, got)
			}
		}
	}
}

// checksumOf returns the ones' complement sum of a header.
func checksumOf(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
