// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
)

// TestReplayIsSplit: templates too large for one message are split. The sequence ends at the exporter's next number.
func TestReplayIsSplit(t *testing.T) {
	var all []ipfix.Template
	for i := range 100 {
		id := uint16(300 + i)
		all = append(all, ipfix.Template{ID: id, Options: i%3 == 0, Record: slices.Concat([]byte{byte(id >> 8), byte(id), 0, 10, 0, 1}, make([]byte, 40))})
		if i%3 != 0 {
			all[i].Record = slices.Concat([]byte{byte(id >> 8), byte(id), 0, 10}, make([]byte, 40))
		}
	}
	for i := range all { // NetFlow v9 lengths are in bytes
		if all[i].Options {
			all[i].Record[3], all[i].Record[5] = 4, 36
		}
	}
	messages := replayMessages(ipfix.Header{Version: ipfix.NetFlow9, Domain: 1}, 5000, all, 1400)
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
	one := ipfix.Template{ID: 300, Record: make([]byte, 2000)} // longer than the limit, but valid
	if m := replayMessages(ipfix.Header{Version: ipfix.IPFIX}, 7, []ipfix.Template{one, all[1]}, 1400); len(m) != 2 || len(m[0]) < 2000 {
		t.Errorf("%d messages", len(m))
	}
}

func FuzzTemplates(f *testing.F) {
	for _, v := range []uint16{ipfix.NetFlow9, ipfix.IPFIX} {
		h := ipfix.Header{Version: v, Domain: 3, Sequence: 4}
		e := ipfixtest.Templates(v)
		f.Add(ipfixtest.Message(h, ipfixtest.Set(ipfix.SetID(v, false), e[0].Record...), ipfixtest.Set(ipfix.SetID(v, true), e[1].Record...)))
		f.Add(ipfixtest.Message(h, ipfixtest.Set(ipfix.SetID(v, false), 1, 4, 0, 0), ipfixtest.Set(300, 1, 2, 3)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ipfix.Parse(b)
		if err != nil {
			return
		}
		s := &FlowSession{}
		if _, err := s.apply(m.Changes); err != nil {
			return
		}
		k := bpf.TemplatesSession{Version: m.Version, Domain: m.Domain}
		s.nextSequence(k, heardAs(&m, 1, 1))
		var back FlowSession
		if err := back.unmarshal(s.marshal()); err != nil || !slices.EqualFunc(s.Templates, back.Templates, ipfix.Template.Equal) || back.Bytes != s.Bytes {
			t.Fatalf("stored: %v, read: %v %v", s.Templates, back.Templates, err)
		}
		again := &FlowSession{}
		for _, r := range s.replay(k, heardAs(&m, 1, 1), 1400) {
			n, err := ipfix.Parse(r)
			if err != nil {
				t.Fatalf("a replay that cannot be read: %x: %v", r, err)
			}
			again.apply(n.Changes)
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
	loopback := netip.MustParseAddrPort("127.0.0.1:9991")
	f.Add(udpPacket(loopback, loopback, []byte("hello")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, ok := readDatagram(b); ok && !bytes.Contains(b, m.Payload) {
			t.Fatal("a payload from elsewhere")
		}
	})
}

func TestStoredSession(t *testing.T) {
	var s FlowSession
	if s.unmarshal([]byte("short")) == nil {
		t.Error("a short session is read")
	}
	b := (&FlowSession{Templates: ipfixtest.Templates(ipfix.IPFIX)}).marshal()
	for n := range len(b) {
		if new(FlowSession).unmarshal(b[:n]) == nil {
			t.Errorf("a session cut at %d of %d bytes is read", n, len(b))
		}
	}
}
