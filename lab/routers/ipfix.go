// SPDX-License-Identifier: Apache-2.0

package routers

import "time"

// Template numbers (RFC 7011 section 3.4.1: 256 and above).
const (
	template4 = 256
	template6 = 257
)

// element is one information element of a template: its number in the IANA registry and its length in bytes.
type element struct{ id, size uint16 }

// counted follow the addresses in both templates: ports, protocol, octets, packets, start and end in
// milliseconds, ingress and egress interface.
var counted = []element{{7, 2}, {11, 2}, {4, 1}, {1, 8}, {2, 8}, {152, 8}, {153, 8}, {10, 4}, {14, 4}}

func (d *Device) template() (id uint16, fields []element) {
	if d.Addr.Is4() {
		return template4, append([]element{{8, 4}, {12, 4}}, counted...) // sourceIPv4Address, destinationIPv4Address
	}
	return template6, append([]element{{27, 16}, {28, 16}}, counted...) // sourceIPv6Address, destinationIPv6Address
}

// IPFIX appends one IPFIX message (RFC 7011) to b and returns it. seq is the number of data records the
// device sent before, as the header wants it; records is how many this one holds; each counts one packet,
// so that a collector's sum of packets is a number of records. epoch becomes the ingress interface.
func (d *Device) IPFIX(b []byte, seq uint32, withTemplate bool, records int, epoch uint32, now time.Time) []byte {
	id, fields := d.template()
	start := len(b)
	b = be.AppendUint16(b, 10)
	b = be.AppendUint16(b, 0) // length, below
	b = be.AppendUint32(b, uint32(now.Unix()))
	b = be.AppendUint32(b, seq)
	b = be.AppendUint32(b, uint32(d.Index+1)) // observation domain
	if withTemplate {
		b = be.AppendUint16(b, 2) // set of templates
		b = be.AppendUint16(b, uint16(8+4*len(fields)))
		b = be.AppendUint16(b, id)
		b = be.AppendUint16(b, uint16(len(fields)))
		for _, f := range fields {
			b = be.AppendUint16(b, f.id)
			b = be.AppendUint16(b, f.size)
		}
	}
	if records > 0 {
		set := len(b)
		b = be.AppendUint16(b, id)
		b = be.AppendUint16(b, 0)
		for i := range records {
			b = d.flow(b, seq+uint32(i), epoch, now)
		}
		be.PutUint16(b[set+2:], uint16(len(b)-set))
	}
	be.PutUint16(b[start+2:], uint16(len(b)-start))
	return b
}

// addresses appends those of the flow number n.
func (d *Device) addresses(b []byte, n uint32) []byte {
	if d.Addr.Is4() {
		return append(b, 192, 0, 2, byte(n), 198, 51, 100, byte(n>>8))
	}
	for _, side := range [2]byte{1, 2} {
		b = append(b, 0x20, 0x01, 0x0d, 0xb8, 0, 0xf1, 0, side, 0, 0, 0, 0)
		b = be.AppendUint32(b, n&0xff)
	}
	return b
}

// flow appends the data record number n.
func (d *Device) flow(b []byte, n, epoch uint32, now time.Time) []byte {
	b = d.addresses(b, n)
	b = be.AppendUint16(b, uint16(1024+n%60000))
	b = be.AppendUint16(b, 443)
	b = append(b, 6)
	b = be.AppendUint64(b, 1000)
	b = be.AppendUint64(b, 1)
	ms := uint64(now.UnixMilli())
	b = be.AppendUint64(b, ms-100)
	b = be.AppendUint64(b, ms)
	b = be.AppendUint32(b, epoch)
	return be.AppendUint32(b, 2)
}
