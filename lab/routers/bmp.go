// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"net/netip"
	"time"
)

// BMP message types (RFC 7854 section 4.1).
const (
	bmpRouteMonitoring = 0
	bmpStatistics      = 1
	bmpPeerUp          = 3
	bmpInitiation      = 4
	bmpTermination     = 5
)

// firstPort is the remote port of a Peer Up message in session 0; see PeerUp.
const firstPort = 1024

// prefixes is the number of repeatedly announced routes of a device. It is small, so a collector's table of
// routes does not grow with the length of a run.
const prefixes = 16

func bmp(b []byte, kind byte, body func([]byte) []byte) []byte {
	start := len(b)
	b = append(b, 3, 0, 0, 0, 0, kind)
	b = body(b)
	be.PutUint32(b[start+1:], uint32(len(b)-start))
	return b
}

func tlv(b []byte, kind uint16, v string) []byte {
	b = be.AppendUint16(b, kind)
	b = be.AppendUint16(b, uint16(len(v)))
	return append(b, v...)
}

// in16 appends an address in BMP's 16 bytes: IPv4 in the last four (RFC 7854 section 4.2).
func in16(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		v4 := a.As4()
		return append(append(b, make([]byte, 12)...), v4[:]...)
	}
	v6 := a.As16()
	return append(b, v6[:]...)
}

// perPeer appends the per-peer header (RFC 7854 section 4.2): global instance, pre-policy.
func (d *Device) perPeer(b []byte, now time.Time) []byte {
	flags := byte(0)
	if d.peer.Is6() {
		flags = 0x80 // V
	}
	b = append(b, 0, flags)
	b = be.AppendUint64(b, 0) // distinguisher
	b = in16(b, d.peer)
	b = be.AppendUint32(b, peerAS)
	b = append(b, 198, 19, d.id[2], d.id[3])
	b = be.AppendUint32(b, uint32(now.Unix()))
	return be.AppendUint32(b, uint32(now.Nanosecond()/1000))
}

// bgp appends a BGP message (RFC 4271 section 4.1).
func bgp(b []byte, kind byte, body func([]byte) []byte) []byte {
	start := len(b)
	for range 16 {
		b = append(b, 0xff)
	}
	b = append(b, 0, 0, kind)
	b = body(b)
	be.PutUint16(b[start+16:], uint16(len(b)-start))
	return b
}

// bgpOpen appends an OPEN with the capabilities IPv4 and IPv6 unicast, route refresh and 4-octet AS.
func bgpOpen(b []byte, as uint32, id [4]byte) []byte {
	return bgp(b, 1, func(b []byte) []byte {
		b = append(b, 4)
		b = be.AppendUint16(b, uint16(as)) // the AS numbers used here fit
		b = be.AppendUint16(b, 180)
		b = append(b, id[:]...)
		caps := []byte{1, 4, 0, 1, 0, 1, 1, 4, 0, 2, 0, 1, 2, 0, 65, 4}
		caps = be.AppendUint32(caps, as)
		b = append(b, byte(len(caps)+2), 2, byte(len(caps)))
		return append(b, caps...)
	})
}

// Initiation appends the first message of a session (RFC 7854 section 4.3).
func (d *Device) Initiation(b []byte) []byte {
	return bmp(b, bmpInitiation, func(b []byte) []byte {
		return tlv(tlv(b, 1, "simulated router"), 2, d.Name())
	})
}

// PeerUp appends the report of the BGP neighbour (RFC 7854 section 4.10). The remote port of the BGP
// session holds the number of the BMP session. Collectors print it, so a logged Peer Up identifies the
// device's session.
func (d *Device) PeerUp(b []byte, session int, now time.Time) []byte {
	return bmp(b, bmpPeerUp, func(b []byte) []byte {
		b = d.perPeer(b, now)
		b = in16(b, d.self)
		b = be.AppendUint16(b, 179)
		b = be.AppendUint16(b, firstPort+uint16(session%60000))
		b = bgpOpen(b, routerAS, d.id)
		return bgpOpen(b, peerAS, [4]byte{198, 19, d.id[2], d.id[3]})
	})
}

// SessionOfPort returns the session number from the remote port of a Peer Up.
func SessionOfPort(port int) int { return port - firstPort }

// RouteMonitoring appends an announcement of one prefix, number n of the device (RFC 7854 section 4.6).
// epoch becomes the MULTI_EXIT_DISC.
func (d *Device) RouteMonitoring(b []byte, n, epoch uint32, now time.Time) []byte {
	return bmp(b, bmpRouteMonitoring, func(b []byte) []byte {
		b = d.perPeer(b, now)
		return bgp(b, 2, func(b []byte) []byte {
			b = append(b, 0, 0) // no withdrawn routes
			attrs := len(b)
			b = append(b, 0, 0)
			b = append(b, 0x40, 1, 1, 0)     // ORIGIN IGP
			b = append(b, 0x40, 2, 10, 2, 2) // AS_PATH, a sequence of two
			b = be.AppendUint32(b, peerAS)
			b = be.AppendUint32(b, 64512+n%64)
			if d.peer.Is4() {
				next := d.peer.As4()
				b = append(append(b, 0x40, 3, 4), next[:]...)
			}
			b = be.AppendUint32(append(b, 0x80, 4, 4), epoch) // MULTI_EXIT_DISC
			if d.peer.Is6() {
				b = d.reach6(b, n)
			}
			be.PutUint16(b[attrs:], uint16(len(b)-attrs-2))
			if d.peer.Is4() {
				b = append(b, 24, 203, 0, byte(n%prefixes)) // NLRI 203.0.n.0/24
			}
			return b
		})
	})
}

// reach6 appends MP_REACH_NLRI for 2001:db8:20:n::/64 (RFC 4760, RFC 2545).
func (d *Device) reach6(b []byte, n uint32) []byte {
	next := d.peer.As16()
	b = append(b, 0x80, 14, 2+1+1+16+1+1+8, 0, 2, 1, 16)
	b = append(b, next[:]...)
	return append(b, 0, 64, 0x20, 0x01, 0x0d, 0xb8, 0, 0x20, 0, byte(n%prefixes))
}

// Statistics appends a Statistics Report (RFC 7854 section 4.8) of rejected and known routes.
func (d *Device) Statistics(b []byte, routes uint64, now time.Time) []byte {
	return bmp(b, bmpStatistics, func(b []byte) []byte {
		b = d.perPeer(b, now)
		b = be.AppendUint32(b, 2)
		b = append(b, 0, 0, 0, 4, 0, 0, 0, 0) // type 0: rejected by inbound policy
		b = append(b, 0, 7, 0, 8)             // type 7: routes in Adj-RIBs-In
		return be.AppendUint64(b, routes)
	})
}

// termination appends the last message of a session: administratively closed (RFC 7854 section 4.5).
func (d *Device) termination(b []byte) []byte {
	return bmp(b, bmpTermination, func(b []byte) []byte { return append(b, 0, 1, 0, 2, 0, 0) })
}
