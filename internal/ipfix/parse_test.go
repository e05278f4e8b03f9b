// SPDX-License-Identifier: Apache-2.0

package ipfix_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
)

func TestParseTemplates(t *testing.T) {
	enterprise := []byte{1, 4, 0, 2, 0x80, 8, 0, 4, 0, 0, 0x12, 0x34, 0, 1, 0, 8}
	variable := []byte{1, 6, 0, 2, 0, 8, 0, 4, 0, 82, 0xff, 0xff}
	h9, h10 := ipfix.Header{Version: ipfix.NetFlow9, Domain: 3}, ipfix.Header{Version: ipfix.IPFIX, Domain: 3}
	long := slices.Concat([]byte{1, 7, 2, 0}, make([]byte, 4*512))
	for _, c := range []struct {
		name     string
		b        []byte
		want     []uint16 // templates; a withdrawal is its number plus 1
		lengths  []int    // of data records
		rejected bool
	}{
		{"nothing", ipfixtest.Message(h10), nil, nil, false},
		{"ipfix", ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...)), []uint16{260}, []int{12}, false},
		{"netflow9", ipfixtest.Message(h9, ipfixtest.Set(0, ipfixtest.Record...)), []uint16{260}, []int{12}, false},
		{"netflow9, set 2", ipfixtest.Message(h9, ipfixtest.Set(2, ipfixtest.Record...)), nil, nil, true},
		{"data before", ipfixtest.Message(h10, ipfixtest.Set(999, 1, 2, 3, 4), ipfixtest.Set(2, ipfixtest.Record...)), []uint16{260}, []int{12}, false},
		{"two in a set, padded", ipfixtest.Message(h9, ipfixtest.Set(0, append(slices.Concat(ipfixtest.Record, variable), 0, 0)...)), []uint16{260, 262}, []int{12, 4 + 0xffff}, false},
		{"enterprise", ipfixtest.Message(h10, ipfixtest.Set(2, enterprise...)), []uint16{260}, []int{12}, false},
		{"variable length", ipfixtest.Message(h10, ipfixtest.Set(2, variable...)), []uint16{262}, []int{0}, false},
		{"options", ipfixtest.Message(h10, ipfixtest.Set(3, ipfixtest.Templates(ipfix.IPFIX)[1].Record...)), []uint16{261}, []int{12}, false},
		{"options of netflow9", ipfixtest.Message(h9, ipfixtest.Set(1, ipfixtest.Templates(ipfix.NetFlow9)[1].Record...)), []uint16{261}, []int{12}, false},
		{"more scope than fields", ipfixtest.Message(h10, ipfixtest.Set(3, 1, 5, 0, 1, 0, 2, 0, 149, 0, 4)), nil, nil, true},
		{"withdrawal", ipfixtest.Message(h10, ipfixtest.Set(2, 1, 4, 0, 0)), []uint16{261}, []int{0}, false},
		{"withdrawal of all", ipfixtest.Message(h10, ipfixtest.Set(2, 0, 2, 0, 0)), []uint16{3}, []int{0}, false},
		{"withdrawal of all in the other's set", ipfixtest.Message(h10, ipfixtest.Set(2, 0, 3, 0, 0)), nil, nil, true},
		{"no fields in netflow9", ipfixtest.Message(h9, ipfixtest.Set(0, 1, 4, 0, 0)), nil, nil, true},
		{"number below 256", ipfixtest.Message(h10, ipfixtest.Set(2, 0, 255, 0, 1, 0, 8, 0, 4)), nil, nil, true},
		{"a field is missing", ipfixtest.Message(h10, ipfixtest.Set(2, 1, 4, 0, 3, 0, 8, 0, 4, 0, 1, 0, 8)), nil, nil, true},
		{"half an enterprise number", ipfixtest.Message(h10, ipfixtest.Set(2, 1, 4, 0, 1, 0x80, 8, 0, 4, 0, 0)), nil, nil, true},
		{"longer than any datagram", ipfixtest.Message(h10, ipfixtest.Set(2, long...)), nil, nil, true},
		{"a set of 3 bytes", ipfixtest.Message(h10, []byte{0, 2, 0, 3}), nil, nil, true},
		{"a set beyond the end", ipfixtest.Message(h10, []byte{0, 2, 0, 30, 1, 4}), nil, nil, true},
		{"bytes behind the last set", ipfixtest.Message(h10, []byte{0, 0}), nil, nil, true},
		{"zeros behind the last set of netflow9", ipfixtest.Message(h9, []byte{0, 0}), nil, nil, false},
		{"no set has this number", ipfixtest.Message(h10, ipfixtest.Set(4, 0, 0, 0, 0)), nil, nil, true},
		{"version 5", append([]byte{0, 5}, make([]byte, 70)...), nil, nil, true},
		{"a wrong length", append(ipfixtest.Message(h10, ipfixtest.Set(2, ipfixtest.Record...)), 0), nil, nil, true},
		{"empty", nil, nil, nil, true},
	} {
		m, err := ipfix.Parse(c.b)
		if (err != nil) != c.rejected || err != nil && !errors.Is(err, ipfix.ErrMalformed) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var ids []uint16
		var lengths []int
		for _, x := range m.Changes {
			if x.Template != nil {
				ids, lengths = append(ids, x.Template.ID), append(lengths, x.Template.DataLength(m.Version))
			} else {
				ids, lengths = append(ids, x.Withdrawn.ID+1), append(lengths, 0)
			}
		}
		if err == nil && (!slices.Equal(ids, c.want) || !slices.Equal(lengths, c.lengths)) {
			t.Errorf("%s: %v with records of %v bytes, want %v with %v", c.name, ids, lengths, c.want, c.lengths)
		}
	}
}
