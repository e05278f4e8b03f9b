// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
)

func TestSessionIsBounded(t *testing.T) {
	s := &FlowSession{}
	var err error
	for i := range 2 * maxSessionTemplates {
		id := uint16(ipfix.MinTemplateID + i)
		record := append(binary.BigEndian.AppendUint16(nil, id), 0, 1, 0, 8, 0, 4)
		_, perr := s.apply([]ipfix.Change{{Template: &ipfix.Template{ID: id, Record: record}}})
		err = errors.Join(err, perr)
	}
	if len(s.Templates) != maxSessionTemplates || !errors.Is(err, errNoRoom) {
		t.Errorf("%d templates: %v", len(s.Templates), err)
	}
	if n, err := s.apply([]ipfix.Change{{Template: &ipfix.Template{ID: 300, Record: []byte{1, 44, 0, 1, 0, 12, 0, 4}}}}); n != 1 || err != nil {
		t.Errorf("a change of a template that is there: %d, %v", n, err)
	}
	if n, err := s.apply([]ipfix.Change{{Withdrawn: &ipfix.Withdrawal{ID: 2, All: true}}}); n != maxSessionTemplates || err != nil || s.Bytes != 0 {
		t.Errorf("all withdrawn: %d, %v, %d bytes left", n, err, s.Bytes)
	}
	for i := range 100 {
		s.Put(ipfix.Template{ID: uint16(300 + i), Record: make([]byte, ipfix.MaxTemplateBytes)})
	}
	if s.Bytes > maxSessionBytes || s.Bytes < maxSessionBytes-ipfix.MaxTemplateBytes {
		t.Errorf("%d bytes, the most should be %d", s.Bytes, maxSessionBytes)
	}
}

// TestRoomIsMadeOfTheSilent: forged exporters with a single message do not displace active ones.
func TestRoomIsMadeOfTheSilent(t *testing.T) {
	b := newBook()
	key := func(i int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).As16(), Domain: uint32(i)}
	}
	for i := range maxSessions + 1 {
		b.Add(key(i), &FlowSession{Bytes: 10, Proven: true})
	}
	if c := b.crowded(key(0).Src); c != crowdAll {
		t.Errorf("crowd %d", c)
	}
	// The first thousand are always active.
	gone := b.silent(crowdAll, key(maxSessions), func(k bpf.TemplatesSession) uint64 {
		if k.Domain < 1000 {
			return 1e9
		}
		return uint64(k.Domain)
	})
	for _, k := range gone {
		if k.Domain < 1000 || k.Domain > 1000+maxSessions/crowdShare {
			t.Fatalf("session %d goes", k.Domain)
		}
		b.Remove(k)
	}
	if c := b.crowded(key(0).Src); c != crowdNone || b.Bytes != (10+sessionBytes)*len(b.Sessions) {
		t.Errorf("%d sessions, %d bytes, crowd %d", len(b.Sessions), b.Bytes, c)
	}
	src := key(5).Src
	for i := range maxSessionsOfAddress {
		b.Add(bpf.TemplatesSession{Src: src, Sport: uint16(i + 1)}, &FlowSession{})
	}
	one := b.silent(crowdAddress, key(5), func(k bpf.TemplatesSession) uint64 { return uint64(k.Sport) })
	if c := b.crowded(src); c != crowdAddress || len(one) != maxSessionsOfAddress/crowdShare+1 || one[0].Src != src || one[0].Sport != 1 {
		t.Errorf("of one address: crowd %d, %v", c, one)
	}
}

// TestBookIsBounded: a session, an address, newcomers and the whole book stay within their limits. Proven sessions
// stay.
func TestBookIsBounded(t *testing.T) {
	b := newBook()
	last := func(k bpf.TemplatesSession) uint64 { return uint64(k.Domain) }
	key := func(address, domain int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(address >> 16), byte(address >> 8), byte(address)}).As16(), Domain: uint32(domain)}
	}
	enter := func(k bpf.TemplatesSession, records, size int) *FlowSession {
		s := &FlowSession{}
		b.Add(k, s)
		before := s.Size()
		for i := range records {
			if _, err := s.Put(ipfix.Template{ID: uint16(256 + i), Record: make([]byte, size)}); err != nil {
				t.Fatal(err)
			}
		}
		b.grown(k, s, before)
		for c := b.crowded(k.Src); c != crowdNone; c = b.crowded(k.Src) {
			for _, gone := range b.silent(c, k, last) {
				b.Remove(gone)
			}
		}
		return s
	}
	for i := range 1000 {
		b.prove(enter(key(0xff0000+i, 0), 8, 60)) // silent longest of all
	}
	proven := b.Bytes
	for domain := range 1000 {
		enter(key(1, domain), 15, 1000)
		if u := b.Of[key(1, 0).Src]; u.Bytes > maxAddressBytes || u.Sessions > maxSessionsOfAddress {
			t.Fatalf("an address has %+v", *u)
		}
	}
	for i := range 3 * maxNewcomers {
		enter(key(2+i, i), 1, 1300)
		if b.Newcomers.Bytes > maxNewcomerBytes || b.Newcomers.Sessions > maxNewcomers || b.Bytes > maxBookBytes {
			t.Fatalf("newcomers %+v, all %d bytes", b.Newcomers, b.Bytes)
		}
	}
	var sum int
	for k, s := range b.Sessions {
		sum += s.Size()
		if !s.Proven {
			b.Remove(k)
		}
	}
	if len(b.Sessions) != 1000 || b.Bytes != proven || b.Newcomers != (BookUse{}) || sum < maxNewcomerBytes/2 {
		t.Errorf("left %d sessions of %d bytes, newcomers %+v; before %d bytes, in all %d", len(b.Sessions), b.Bytes, b.Newcomers, proven, sum)
	}
}

func TestNextSequence(t *testing.T) {
	s := &FlowSession{Templates: []ipfix.Template{{ID: 260, Record: ipfixtest.Record}, {ID: 262, Record: []byte{1, 6, 0, 1, 0, 82, 0xff, 0xff}}}}
	heard := func(sets ...ipfix.Set) bpf.TemplatesHeard {
		m := ipfix.Message{Header: ipfix.Header{Sequence: 0xfffffffe}, Sets: sets}
		return heardAs(&m, 1, 1)
	}
	for _, c := range []struct {
		version uint16
		h       bpf.TemplatesHeard
		want    uint32
		exact   bool
	}{
		{ipfix.NetFlow9, heard(ipfix.Set{ID: 260, Length: 400}), 0xffffffff, true},
		{ipfix.IPFIX, heard(), 0xfffffffe, true},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 2, Length: 100}), 0xfffffffe, true},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 260, Length: 4 + 12*3 + 2}), 1, true}, // padded, and the number wraps around
		{ipfix.IPFIX, heard(ipfix.Set{ID: 260, Length: 16}, ipfix.Set{ID: 260, Length: 16}), 0, true},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 262, Length: 40}), 0xfffffffe, false},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 999, Length: 40}, ipfix.Set{ID: 260, Length: 16}), 0xffffffff, false},
		{ipfix.IPFIX, heard(make([]ipfix.Set, 9)...), 0xfffffffe, false},
	} {
		if next, exact := s.nextSequence(bpf.TemplatesSession{Version: c.version}, c.h); next != c.want || exact != c.exact {
			t.Errorf("version %d, %+v: %d, %v; want %d, %v", c.version, c.h.Set[:min(2, c.h.Sets)], next, exact, c.want, c.exact)
		}
	}
}
