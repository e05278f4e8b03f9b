// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"net/netip"
	"testing"
	"time"
)

var sources = []netip.Addr{netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("fd00:99::1")}

// Every length in an IPFIX message matches its content (RFC 7011 sections 3.1, 3.3, 3.4.1). nfacctd checks
// the meaning of the content in lab/replay.
func TestIPFIXLengths(t *testing.T) {
	for _, a := range sources {
		for _, template := range []bool{true, false} {
			for _, records := range []int{0, 1, 4} {
				d := NewDevice(3, a)
				b := d.IPFIX([]byte("before"), 77, template, records, 9, time.Unix(1700000000, 0))[len("before"):]
				if v, n := be.Uint16(b), be.Uint16(b[2:]); v != 10 || int(n) != len(b) {
					t.Fatalf("%s: version %d, length %d of %d", a, v, n, len(b))
				}
				if seq, domain := be.Uint32(b[8:]), be.Uint32(b[12:]); seq != 77 || domain != 4 {
					t.Errorf("%s: sequence %d, domain %d", a, seq, domain)
				}
				size := 0 // of a record, by the template
				_, fields := d.template()
				for _, f := range fields {
					size += int(f.Length)
				}
				sets := 0
				for rest := b[16:]; len(rest) > 0; sets++ {
					id, n := be.Uint16(rest), int(be.Uint16(rest[2:]))
					if n < 4 || n > len(rest) {
						t.Fatalf("%s: set %d of length %d in %d bytes", a, id, n, len(rest))
					}
					if id == 2 && n != 8+4*len(fields) || id >= 256 && n != 4+records*size {
						t.Errorf("%s: set %d of length %d", a, id, n)
					}
					rest = rest[n:]
				}
				want := 0
				if template {
					want++
				}
				if records > 0 {
					want++
				}
				if sets != want {
					t.Errorf("%s: %d sets, want %d", a, sets, want)
				}
			}
		}
	}
}

// A BMP stream splits into messages of the right types by their lengths alone (RFC 7854 section 4.1), and
// so do the BGP messages inside.
func TestBMPLengths(t *testing.T) {
	now := time.Unix(1700000000, 5000)
	for _, a := range sources {
		d := NewDevice(300, a)
		b := d.Initiation(nil)
		b = d.PeerUp(b, 5, now)
		b = d.RouteMonitoring(b, 17, 70000, now)
		b = d.Statistics(b, 16, now)
		b = d.termination(b)
		var kinds []byte
		for len(b) > 0 {
			n := int(be.Uint32(b[1:]))
			if b[0] != 3 || n < 6 || n > len(b) {
				t.Fatalf("%s: version %d, length %d in %d bytes", a, b[0], n, len(b))
			}
			body := b[6:n]
			switch b[5] {
			case bmpPeerUp:
				if port := be.Uint16(body[42+18:]); SessionOfPort(int(port)) != 5 {
					t.Errorf("%s: session %d in port %d", a, SessionOfPort(int(port)), port)
				}
				if n := bgpLength(t, body[42+20:]); n+bgpLength(t, body[42+20+n:]) != len(body)-42-20 {
					t.Errorf("%s: two OPEN messages do not fill the Peer Up", a)
				}
			case bmpRouteMonitoring:
				if bgpLength(t, body[42:]) != len(body)-42 {
					t.Errorf("%s: the UPDATE does not fill the Route Monitoring", a)
				}
			}
			kinds = append(kinds, b[5])
			b = b[n:]
		}
		if string(kinds) != string([]byte{bmpInitiation, bmpPeerUp, bmpRouteMonitoring, bmpStatistics, bmpTermination}) {
			t.Errorf("%s: messages %v", a, kinds)
		}
	}
}

func bgpLength(t *testing.T, b []byte) int {
	t.Helper()
	if len(b) < 19 || b[0] != 0xff {
		t.Fatalf("not a BGP message: %x", b)
	}
	return int(be.Uint16(b[16:]))
}
