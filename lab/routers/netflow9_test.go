// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"testing"
	"time"
)

// Every length in a NetFlow 9 packet matches its content (RFC 3954 sections 5.1 to 5.3). goflow2 and nfcapd
// check the meaning of the content in lab/replay.
func TestNetFlow9Lengths(t *testing.T) {
	for _, a := range sources {
		for _, template := range []bool{true, false} {
			for _, records := range []int{0, 1, 5} {
				d := NewDevice(3, a)
				b := d.NetFlow9([]byte("before"), 77, template, records, 9, time.Unix(1700000000, 0))[len("before"):]
				want := records
				if template {
					want++
				}
				if v, n := be.Uint16(b), int(be.Uint16(b[2:])); v != 9 || n != want {
					t.Fatalf("%s: version %d, %d records, want %d", a, v, n, want)
				}
				if seq, id := be.Uint32(b[12:]), be.Uint32(b[16:]); seq != 77 || id != 4 {
					t.Errorf("%s: sequence %d, source id %d", a, seq, id)
				}
				checkFlowSets(t, d, b[20:], records)
			}
		}
	}
}

func checkFlowSets(t *testing.T, d *Device, rest []byte, records int) {
	t.Helper()
	size := 0 // of a record, by the template
	_, fields := d.template9()
	for _, f := range fields {
		size += int(f.Length)
	}
	for len(rest) > 0 {
		id, n := be.Uint16(rest), int(be.Uint16(rest[2:]))
		if n < 4 || n > len(rest) || n%4 != 0 {
			t.Fatalf("%s: FlowSet %d of length %d in %d bytes", d.Addr, id, n, len(rest))
		}
		padding := n - 4 - records*size
		if id == 0 && n != 8+4*len(fields) || id >= 256 && (padding < 0 || padding > 3) {
			t.Errorf("%s: FlowSet %d of length %d", d.Addr, id, n)
		}
		rest = rest[n:]
	}
}
