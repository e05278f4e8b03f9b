// SPDX-License-Identifier: Apache-2.0

package ipfix_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/weir-project/weir/internal/ipfix"
)

func Example() {
	template := ipfix.NewTemplate(256, ipfix.Field{ID: 8, Length: 4}, ipfix.Field{ID: 2, Length: 8})
	w := ipfix.Begin(nil, ipfix.Header{Version: ipfix.IPFIX, ExportTime: 1, Sequence: 2, Domain: 3})
	w.Templates(false, template)
	w.Data(256, 1, func(b []byte, _ int) []byte { return append(b, 192, 0, 2, 7, 0, 0, 0, 0, 0, 0, 0, 9) })
	m, err := ipfix.Parse(w.End())
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range m.Changes {
		fmt.Println("template", c.Template.ID, c.Template.Fields(m.Version), "records of", c.Template.DataLength(m.Version))
	}
	for _, s := range m.Sets {
		fmt.Println("set", s.ID, s.Length, hex.EncodeToString(s.Body()))
	}
	// Output:
	// template 256 [{8 4} {2 8}] records of 12
	// set 2 16 010000020008000400020008
	// set 256 16 c00002070000000000000009
}

// TestWriter compares the bytes of both protocols with hand-made messages from the RFCs.
func TestWriter(t *testing.T) {
	odd := ipfix.NewTemplate(300, ipfix.Field{ID: 4, Length: 1})
	options := ipfix.Template{ID: 301, Options: true, Record: []byte{1, 45, 0, 4, 0, 4, 0, 1, 0, 4, 0, 34, 0, 4}}
	for _, c := range []struct {
		version uint16
		want    string
	}{
		{ipfix.IPFIX, "000a0023" + "00000001" + "00000002" + "00000003" + "0002000c" + "012c000100040001" + "012c0007" + "060606"},
		{ipfix.NetFlow9, "00090005" + "00000004" + "00000001" + "00000002" + "00000003" + "0000000c" + "012c000100040001" + "00010014" + "012d000400040001000400220004" + "0000" + "012c0008" + "06060600"},
	} {
		w := ipfix.Begin([]byte("before"), ipfix.Header{Version: c.version, Uptime: 4, ExportTime: 1, Sequence: 2, Domain: 3})
		w.Templates(false, odd, options)
		if c.version == ipfix.NetFlow9 {
			w.Templates(true, odd, options)
		}
		w.Templates(true, odd)
		w.Data(300, 3, func(b []byte, _ int) []byte { return append(b, 6) })
		w.Data(300, 0, nil)
		b := w.End()
		if got := hex.EncodeToString(b[6:]); string(b[:6]) != "before" || got != c.want {
			t.Errorf("version %d: %s, want %s", c.version, got, c.want)
		}
		if _, err := ipfix.Parse(b[6:]); err != nil {
			t.Errorf("version %d: %v", c.version, err)
		}
	}
}

func TestFields(t *testing.T) {
	enterprise := ipfix.Template{ID: 260, Record: []byte{1, 4, 0, 2, 0x80, 8, 0, 4, 0, 0, 0x12, 0x34, 0, 1, 0, 8}}
	for _, c := range []struct {
		version uint16
		t       ipfix.Template
		want    []ipfix.Field
	}{
		{ipfix.IPFIX, enterprise, []ipfix.Field{{ID: 0, Length: 4}, {ID: 1, Length: 8}}},
		{ipfix.NetFlow9, ipfix.NewTemplate(256, ipfix.Field{ID: 0x8008, Length: 4}), []ipfix.Field{{ID: 0x8008, Length: 4}}},
		{ipfix.IPFIX, ipfix.Template{ID: 256, Record: []byte{1, 0, 0, 3, 0, 8}}, nil},
	} {
		if got := c.t.Fields(c.version); !slices.Equal(got, c.want) {
			t.Errorf("version %d of %x: %v, want %v", c.version, c.t.Record, got, c.want)
		}
	}
}

// FuzzParse checks that all parsed records are part of the input, and that writing and parsing them
// again gives the same.
func FuzzParse(f *testing.F) {
	for _, v := range []uint16{ipfix.IPFIX, ipfix.NetFlow9} {
		w := ipfix.Begin(nil, ipfix.Header{Version: v, Domain: 1})
		w.Templates(false, ipfix.NewTemplate(256, ipfix.Field{ID: 8, Length: 4}))
		w.Data(256, 2, func(b []byte, _ int) []byte { return append(b, 1, 2, 3, 4) })
		f.Add(w.End())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ipfix.Parse(b)
		if err != nil {
			if !errors.Is(err, ipfix.ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		var all []ipfix.Template
		for _, c := range m.Changes {
			if c.Template != nil && !slices.ContainsFunc(all, func(t ipfix.Template) bool { return t.ID == c.Template.ID }) {
				all = append(all, *c.Template)
			}
		}
		again, err := ipfix.Parse(ipfix.Encode(m.Header, all))
		if len(ipfix.Encode(m.Header, all)) > 0xffff {
			return
		}
		if err != nil || again.Header != m.Header || len(again.Changes) != len(all) {
			t.Fatalf("%x gives %+v, rewritten %+v, %v", b, m, again, err)
		}
		for _, c := range again.Changes {
			i := slices.IndexFunc(all, func(t ipfix.Template) bool { return t.ID == c.Template.ID })
			if i < 0 || !reflect.DeepEqual(all[i].Fields(m.Version), c.Template.Fields(m.Version)) || !all[i].Equal(*c.Template) {
				t.Fatalf("template %+v came back of %+v", c.Template, all)
			}
		}
	})
}
