// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"time"

	"github.com/weir-project/weir/internal/ipfix"
)

// NetFlow9 appends one NetFlow version 9 export packet (RFC 3954) to b and returns it. seq is the number of
// packets exported before; the rest is like IPFIX.
func (d *Device) NetFlow9(b []byte, seq uint32, withTemplate bool, records int, epoch uint32, now time.Time) []byte {
	id, fields := d.template9()
	uptime := uint32(now.Unix()%86400) * 1000 // as if booted at midnight
	w := ipfix.Begin(b, ipfix.Header{Version: ipfix.NetFlow9, Uptime: uptime, ExportTime: uint32(now.Unix()), Sequence: seq, Domain: uint32(d.Index + 1)})
	if withTemplate {
		w.Templates(false, ipfix.NewTemplate(id, fields...))
	}
	w.Data(id, records, func(b []byte, i int) []byte { return d.flow9(b, seq*uint32(records)+uint32(i), epoch, uptime) })
	return w.End()
}

// counted9 follows the addresses. It is like counted, with times in milliseconds since the boot
// (FIRST_SWITCHED, LAST_SWITCHED) and counters of four bytes.
var counted9 = []ipfix.Field{{ID: 7, Length: 2}, {ID: 11, Length: 2}, {ID: 4, Length: 1}, {ID: 1, Length: 4}, {ID: 2, Length: 4},
	{ID: 22, Length: 4}, {ID: 21, Length: 4}, {ID: 10, Length: 4}, {ID: 14, Length: 4}}

func (d *Device) template9() (id uint16, fields []ipfix.Field) { return d.withAddresses(counted9) }

// flow9 appends data record number n.
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
