// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
)

func TestParseTemplates(t *testing.T) {
	enterprise := []byte{1, 4, 0, 2, 0x80, 8, 0, 4, 0, 0, 0x12, 0x34, 0, 1, 0, 8}
	variable := []byte{1, 6, 0, 2, 0, 8, 0, 4, 0, 82, 0xff, 0xff}
	h9, h10 := ipfix.Header{Version: ipfix.NetFlow9, Domain: 3}, ipfix.Header{Version: ipfix.IPFIX, Domain: 3}
	long := slices.Concat([]byte{1, 7, 2, 0}, make([]byte, 4*512))
	for _, c := range []struct {
		name     string
		b        []byte
		want     []uint16 // templates, withdrawals as their number plus 1
		lengths  []int    // of data records
		rejected bool
	}{
		{"nothing", withSets(h10), nil, nil, false},
		{"ipfix", withSets(h10, set(2, exampleRecord...)), []uint16{260}, []int{12}, false},
		{"netflow9", withSets(h9, set(0, exampleRecord...)), []uint16{260}, []int{12}, false},
		{"netflow9, set 2", withSets(h9, set(2, exampleRecord...)), nil, nil, true},
		{"data before", withSets(h10, set(999, 1, 2, 3, 4), set(2, exampleRecord...)), []uint16{260}, []int{12}, false},
		{"two in a set, padded", withSets(h9, set(0, append(slices.Concat(exampleRecord, variable), 0, 0)...)), []uint16{260, 262}, []int{12, 4 + 0xffff}, false},
		{"enterprise", withSets(h10, set(2, enterprise...)), []uint16{260}, []int{12}, false},
		{"variable length", withSets(h10, set(2, variable...)), []uint16{262}, []int{0}, false},
		{"options", withSets(h10, set(3, exampleTemplates(ipfix.IPFIX)[1].Record...)), []uint16{261}, []int{12}, false},
		{"options of netflow9", withSets(h9, set(1, exampleTemplates(ipfix.NetFlow9)[1].Record...)), []uint16{261}, []int{12}, false},
		{"more scope than fields", withSets(h10, set(3, 1, 5, 0, 1, 0, 2, 0, 149, 0, 4)), nil, nil, true},
		{"withdrawal", withSets(h10, set(2, 1, 4, 0, 0)), []uint16{261}, []int{0}, false},
		{"withdrawal of all", withSets(h10, set(2, 0, 2, 0, 0)), []uint16{3}, []int{0}, false},
		{"withdrawal of all in the other's set", withSets(h10, set(2, 0, 3, 0, 0)), nil, nil, true},
		{"no fields in netflow9", withSets(h9, set(0, 1, 4, 0, 0)), nil, nil, true},
		{"number below 256", withSets(h10, set(2, 0, 255, 0, 1, 0, 8, 0, 4)), nil, nil, true},
		{"a field is missing", withSets(h10, set(2, 1, 4, 0, 3, 0, 8, 0, 4, 0, 1, 0, 8)), nil, nil, true},
		{"half an enterprise number", withSets(h10, set(2, 1, 4, 0, 1, 0x80, 8, 0, 4, 0, 0)), nil, nil, true},
		{"longer than any datagram", withSets(h10, set(2, long...)), nil, nil, true},
		{"a set of 3 bytes", withSets(h10, []byte{0, 2, 0, 3}), nil, nil, true},
		{"a set beyond the end", withSets(h10, []byte{0, 2, 0, 30, 1, 4}), nil, nil, true},
		{"bytes behind the last set", withSets(h10, []byte{0, 0}), nil, nil, true},
		{"zeros behind the last set of netflow9", withSets(h9, []byte{0, 0}), nil, nil, false},
		{"no set has this number", withSets(h10, set(4, 0, 0, 0, 0)), nil, nil, true},
		{"version 5", append([]byte{0, 5}, make([]byte, 70)...), nil, nil, true},
		{"a wrong length", append(withSets(h10, set(2, exampleRecord...)), 0), nil, nil, true},
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

// Templates that do not fit one message come in several, whose sequence ends
// where the exporter's own goes on.
func TestReplayIsSplit(t *testing.T) {
	var all []ipfix.Template
	for i := range 100 {
		id := uint16(300 + i)
		all = append(all, ipfix.Template{ID: id, Options: i%3 == 0, Record: slices.Concat([]byte{byte(id >> 8), byte(id), 0, 10, 0, 1}, make([]byte, 40))})
		if i%3 != 0 {
			all[i].Record = slices.Concat([]byte{byte(id >> 8), byte(id), 0, 10}, make([]byte, 40))
		}
	}
	for i := range all { // of netflow9, lengths are in bytes
		if all[i].Options {
			all[i].Record[3], all[i].Record[5] = 4, 36
		}
	}
	messages := templates.ReplayMessages(ipfix.Header{Version: ipfix.NetFlow9, Domain: 1}, 5000, all, 1400)
	if len(messages) < 4 {
		t.Fatalf("%d messages for %d bytes", len(messages), 100*45)
	}
	var got []uint16
	for i, b := range messages {
		m, err := ipfix.Parse(b)
		if err != nil || len(b) > 1400 {
			t.Fatalf("message %d of %d bytes: %v", i, len(b), err)
		}
		if want := uint32(5000 - len(messages) + i); m.Sequence != want {
			t.Errorf("message %d has sequence number %d, want %d", i, m.Sequence, want)
		}
		for _, c := range m.Changes {
			got = append(got, c.Template.ID)
		}
	}
	slices.Sort(got)
	if len(got) != 100 || got[0] != 300 || got[99] != 399 {
		t.Errorf("templates %v", got)
	}
	one := ipfix.Template{ID: 300, Record: make([]byte, 2000)} // longer than a message should be, but there
	if m := templates.ReplayMessages(ipfix.Header{Version: ipfix.IPFIX}, 7, []ipfix.Template{one, all[1]}, 1400); len(m) != 2 || len(m[0]) < 2000 {
		t.Errorf("%d messages", len(m))
	}
}

func FuzzTemplates(f *testing.F) {
	for _, v := range []uint16{ipfix.NetFlow9, ipfix.IPFIX} {
		h := ipfix.Header{Version: v, Domain: 3, Sequence: 4}
		e := exampleTemplates(v)
		f.Add(withSets(h, set(ipfix.SetID(v, false), e[0].Record...), set(ipfix.SetID(v, true), e[1].Record...)))
		f.Add(withSets(h, set(ipfix.SetID(v, false), 1, 4, 0, 0), set(300, 1, 2, 3)))
	}
	files, _ := filepath.Glob("testdata/templates/*")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ipfix.Parse(b)
		if err != nil {
			return
		}
		s := &templates.FlowSession{}
		if _, err := s.Apply(m.Changes); err != nil {
			return
		}
		k := bpf.TemplatesSession{Version: m.Version, Domain: m.Domain}
		s.NextSequence(k, templates.HeardAs(&m, 1, 1))
		var back templates.FlowSession
		if err := back.Unmarshal(s.Marshal()); err != nil || !slices.EqualFunc(s.Templates, back.Templates, ipfix.Template.Equal) || back.Bytes != s.Bytes {
			t.Fatalf("stored: %v, read: %v %v", s.Templates, back.Templates, err)
		}
		again := &templates.FlowSession{}
		for _, r := range s.Replay(k, templates.HeardAs(&m, 1, 1), 1400) {
			n, err := ipfix.Parse(r)
			if err != nil {
				t.Fatalf("a replay that cannot be read: %x: %v", r, err)
			}
			again.Apply(n.Changes)
		}
		byID := func(a, b ipfix.Template) int { return int(a.ID) - int(b.ID) }
		slices.SortFunc(s.Templates, byID)
		slices.SortFunc(again.Templates, byID)
		if !slices.EqualFunc(s.Templates, again.Templates, ipfix.Template.Equal) {
			t.Fatalf("learnt %v, replayed %v", s.Templates, again.Templates)
		}
	})
}

func FuzzDatagram(f *testing.F) {
	f.Add(templates.UDPPacket(loopback4, loopback4, []byte("hello")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, ok := templates.ReadDatagram(b); ok && !bytes.Contains(b, m.Payload) {
			t.Fatal("a payload from elsewhere")
		}
	})
}

func TestStoredSession(t *testing.T) {
	var s templates.FlowSession
	if s.Unmarshal([]byte("short")) == nil {
		t.Error("a short session is read")
	}
	b := (&templates.FlowSession{Templates: exampleTemplates(ipfix.IPFIX)}).Marshal()
	for n := range len(b) {
		if new(templates.FlowSession).Unmarshal(b[:n]) == nil {
			t.Errorf("a session cut at %d of %d bytes is read", n, len(b))
		}
	}
}
