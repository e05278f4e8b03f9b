// SPDX-License-Identifier: Apache-2.0

package routers

import "time"

// NetFlow9 appends one NetFlow version 9 export packet (RFC 3954) to b and returns it. seq is the number of
// packets that the device exported before; otherwise it is like IPFIX.
func (d *Device) NetFlow9(b []byte, seq uint32, withTemplate bool, records int, epoch uint32, now time.Time) []byte {
	id, fields := d.template9()
	count := records
	if withTemplate {
		count++
	}
	uptime := uint32(now.Unix()%86400) * 1000 // as if it had booted at midnight
	b = be.AppendUint16(b, 9)
	b = be.AppendUint16(b, uint16(count))
	b = be.AppendUint32(b, uptime)
	b = be.AppendUint32(b, uint32(now.Unix()))
	b = be.AppendUint32(b, seq)
	b = be.AppendUint32(b, uint32(d.Index+1)) // source id
	if withTemplate {
		b = be.AppendUint16(b, 0) // a FlowSet of templates
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
			b = d.flow9(b, seq*uint32(records)+uint32(i), epoch, uptime)
		}
		for (len(b)-set)%4 != 0 { // RFC 3954 section 5.3: padded to 32 bits
			b = append(b, 0)
		}
		be.PutUint16(b[set+2:], uint16(len(b)-set))
	}
	return b
}

// counted9 follow the addresses: as counted, but the times are in milliseconds since the device booted
// (FIRST_SWITCHED, LAST_SWITCHED) and the counters have four bytes.
var counted9 = []element{{7, 2}, {11, 2}, {4, 1}, {1, 4}, {2, 4}, {22, 4}, {21, 4}, {10, 4}, {14, 4}}

func (d *Device) template9() (id uint16, fields []element) {
	if d.Addr.Is4() {
		return template4, append([]element{{8, 4}, {12, 4}}, counted9...)
	}
	return template6, append([]element{{27, 16}, {28, 16}}, counted9...)
}

// flow9 appends the data record number n.
func (d *Device) flow9(b []byte, n, epoch, uptime uint32) []byte {
	b = d.addresses(b, n)
	b = be.AppendUint16(b, uint16(1024+n%60000))
	b = be.AppendUint16(b, 443)
	b = append(b, 6)
	b = be.AppendUint32(b, 1000)
	b = be.AppendUint32(b, 1)
	b = be.AppendUint32(b, max(uptime, 100)-100)
	b = be.AppendUint32(b, uptime)
	b = be.AppendUint32(b, epoch)
	return be.AppendUint32(b, 2)
}
