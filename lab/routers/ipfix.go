// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"time"

	"github.com/weir-project/weir/internal/ipfix"
)

// Template numbers (RFC 7011 section 3.4.1: 256 and above).
const (
	template4 = 256
	template6 = 257
)

// counted follows the addresses in both templates: ports, protocol, octets, packets, start and end in
// milliseconds, ingress and egress interface.
var counted = []ipfix.Field{{ID: 7, Length: 2}, {ID: 11, Length: 2}, {ID: 4, Length: 1}, {ID: 1, Length: 8}, {ID: 2, Length: 8},
	{ID: 152, Length: 8}, {ID: 153, Length: 8}, {ID: 10, Length: 4}, {ID: 14, Length: 4}}

// addresses4 and addresses6 are source and destination, sourceIPv4Address to destinationIPv6Address.
var (
	addresses4 = []ipfix.Field{{ID: 8, Length: 4}, {ID: 12, Length: 4}}
	addresses6 = []ipfix.Field{{ID: 27, Length: 16}, {ID: 28, Length: 16}}
)

func (d *Device) template() (id uint16, fields []ipfix.Field) { return d.withAddresses(counted) }

// withAddresses returns the device's address fields, followed by fields.
func (d *Device) withAddresses(fields []ipfix.Field) (uint16, []ipfix.Field) {
	if d.Addr.Is4() {
		return template4, append(addresses4[:2:2], fields...)
	}
	return template6, append(addresses6[:2:2], fields...)
}

// IPFIX appends one IPFIX message (RFC 7011) to b and returns it. seq is the number of data records sent
// before, as required by the header. records is the number in this message. Each counts one packet, so a
// collector's sum of packets is a number of records. epoch becomes the ingress interface.
func (d *Device) IPFIX(b []byte, seq uint32, withTemplate bool, records int, epoch uint32, now time.Time) []byte {
	id, fields := d.template()
	w := ipfix.Begin(b, ipfix.Header{Version: ipfix.IPFIX, ExportTime: uint32(now.Unix()), Sequence: seq, Domain: uint32(d.Index + 1)})
	if withTemplate {
		w.Templates(false, ipfix.NewTemplate(id, fields...))
	}
	w.Data(id, records, func(b []byte, i int) []byte { return d.flow(b, seq+uint32(i), epoch, now) })
	return w.End()
}

// addresses appends the addresses of flow number n.
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

// flow appends data record number n.
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
