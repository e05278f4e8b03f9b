// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

func TestSessionIsBounded(t *testing.T) {
	s := &flowSession{}
	var err error
	for i := range 2 * maxSessionTemplates {
		id := uint16(minTemplateID + i)
		record := append(binary.BigEndian.AppendUint16(nil, id), 0, 1, 0, 8, 0, 4)
		_, perr := s.apply([]templateChange{{template: &template{ID: id, Record: record}}})
		err = errors.Join(err, perr)
	}
	if len(s.Templates) != maxSessionTemplates || !errors.Is(err, errNoRoom) {
		t.Errorf("%d templates: %v", len(s.Templates), err)
	}
	if n, err := s.apply([]templateChange{{template: &template{ID: 300, Record: []byte{1, 44, 0, 1, 0, 12, 0, 4}}}}); n != 1 || err != nil {
		t.Errorf("a change of a template that is there: %d, %v", n, err)
	}
	if n, err := s.apply([]templateChange{{withdrawn: &withdrawal{ID: 2, All: true}}}); n != maxSessionTemplates || err != nil || s.bytes != 0 {
		t.Errorf("all withdrawn: %d, %v, %d bytes left", n, err, s.bytes)
	}
	for i := range 100 {
		s.put(template{ID: uint16(300 + i), Record: make([]byte, maxTemplateBytes)})
	}
	if s.bytes > maxSessionBytes || s.bytes < maxSessionBytes-maxTemplateBytes {
		t.Errorf("%d bytes, the most should be %d", s.bytes, maxSessionBytes)
	}
}

// Forged exporters that send once do not push out those that go on.
func TestRoomIsMadeOfTheSilent(t *testing.T) {
	b := newTemplateBook()
	key := func(i int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).As16(), Domain: uint32(i)}
	}
	for i := range maxSessions + 1 {
		b.add(key(i), &flowSession{bytes: 10, proven: true})
	}
	if c := b.crowded(key(0).Src); c != crowdAll {
		t.Errorf("crowd %d", c)
	}
	// The first thousand are heard all the time.
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
		b.remove(k)
	}
	if c := b.crowded(key(0).Src); c != crowdNone || b.bytes != (10+sessionBytes)*len(b.sessions) {
		t.Errorf("%d sessions, %d bytes, crowd %d", len(b.sessions), b.bytes, c)
	}
	src := key(5).Src
	for i := range maxSessionsOfAddress {
		b.add(bpf.TemplatesSession{Src: src, Sport: uint16(i + 1)}, &flowSession{})
	}
	one := b.silent(crowdAddress, key(5), func(k bpf.TemplatesSession) uint64 { return uint64(k.Sport) })
	if c := b.crowded(src); c != crowdAddress || len(one) != maxSessionsOfAddress/crowdShare+1 || one[0].Src != src || one[0].Sport != 1 {
		t.Errorf("of one address: crowd %d, %v", c, one)
	}
}

// What a session, an address, newcomers and all take is bounded, whatever grows; the proven stay.
func TestBookIsBounded(t *testing.T) {
	b := newTemplateBook()
	last := func(k bpf.TemplatesSession) uint64 { return uint64(k.Domain) }
	key := func(address, domain int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(address >> 16), byte(address >> 8), byte(address)}).As16(), Domain: uint32(domain)}
	}
	enter := func(k bpf.TemplatesSession, records, size int) *flowSession {
		s := &flowSession{}
		b.add(k, s)
		before := s.size()
		for i := range records {
			if _, err := s.put(template{ID: uint16(256 + i), Record: make([]byte, size)}); err != nil {
				t.Fatal(err)
			}
		}
		b.grown(k, s, before)
		for c := b.crowded(k.Src); c != crowdNone; c = b.crowded(k.Src) {
			for _, gone := range b.silent(c, k, last) {
				b.remove(gone)
			}
		}
		return s
	}
	for i := range 1000 {
		b.prove(enter(key(0xff0000+i, 0), 8, 60)) // silent longest of all
	}
	proven := b.bytes
	for domain := range 1000 {
		enter(key(1, domain), 15, 1000)
		if u := b.of[key(1, 0).Src]; u.bytes > maxAddressBytes || u.sessions > maxSessionsOfAddress {
			t.Fatalf("an address has %+v", *u)
		}
	}
	for i := range 3 * maxNewcomers {
		enter(key(2+i, i), 1, 1300)
		if b.newcomers.bytes > maxNewcomerBytes || b.newcomers.sessions > maxNewcomers || b.bytes > maxBookBytes {
			t.Fatalf("newcomers %+v, all %d bytes", b.newcomers, b.bytes)
		}
	}
	var sum int
	for k, s := range b.sessions {
		sum += s.size()
		if !s.proven {
			b.remove(k)
		}
	}
	if len(b.sessions) != 1000 || b.bytes != proven || b.newcomers != (bookUse{}) || sum < maxNewcomerBytes/2 {
		t.Errorf("left %d sessions of %d bytes, newcomers %+v; before %d bytes, in all %d", len(b.sessions), b.bytes, b.newcomers, proven, sum)
	}
}

func TestNextSequence(t *testing.T) {
	s := &flowSession{Templates: []template{{ID: 260, Record: exampleRecord}, {ID: 262, Record: []byte{1, 6, 0, 1, 0, 82, 0xff, 0xff}}}}
	heard := func(sets ...flowSet) bpf.TemplatesHeard {
		m := flowMessage{flowHeader: flowHeader{Sequence: 0xfffffffe}, Sets: sets}
		return m.heardAs(1, 1)
	}
	for _, c := range []struct {
		version uint16
		h       bpf.TemplatesHeard
		want    uint32
		exact   bool
	}{
		{netflow9, heard(flowSet{260, 400}), 0xffffffff, true},
		{ipfix, heard(), 0xfffffffe, true},
		{ipfix, heard(flowSet{2, 100}), 0xfffffffe, true},
		{ipfix, heard(flowSet{260, 4 + 12*3 + 2}), 1, true}, // padded, and beyond the last number
		{ipfix, heard(flowSet{260, 16}, flowSet{260, 16}), 0, true},
		{ipfix, heard(flowSet{262, 40}), 0xfffffffe, false},
		{ipfix, heard(flowSet{999, 40}, flowSet{260, 16}), 0xffffffff, false},
		{ipfix, heard(make([]flowSet, 9)...), 0xfffffffe, false},
	} {
		if next, exact := s.nextSequence(bpf.TemplatesSession{Version: c.version}, c.h); next != c.want || exact != c.exact {
			t.Errorf("version %d, %+v: %d, %v; want %d, %v", c.version, c.h.Set[:min(2, c.h.Sets)], next, exact, c.want, c.exact)
		}
	}
}

// What a killed writer left of a session in the store is not read, and the next
// one clears it away.
func TestTemplateStoreIsMended(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.apply()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	whole, torn := bpf.TemplatesSession{Domain: 1, Version: ipfix}, bpf.TemplatesSession{Domain: 2, Version: ipfix}
	w.locked(func(l *kernel.WriteLock) error {
		st, err := openTemplateStore(l, ns)
		if err != nil {
			return err
		}
		defer st.Close()
		s := &flowSession{Served: memberID{7, 8}, Replays: 3}
		for i := range 60 { // more than one chunk
			s.put(template{ID: uint16(300 + i), Record: make([]byte, 20)})
		}
		if err := st.save(whole, s); err != nil {
			return err
		}
		s.generation, s.chunks = 0, 0
		if err := st.save(torn, s); err != nil {
			return err
		}
		if s.chunks < 2 {
			t.Fatalf("%d chunks", s.chunks)
		}
		s.generation++ // the first piece of the next writing
		if err := st.save(torn, &flowSession{generation: s.generation, Templates: s.Templates[:3]}); err != nil {
			return err
		}
		return st.enter(torn, bpf.TemplatesHeard{})
	})
	w.locked(func(l *kernel.WriteLock) error {
		store, err := openTemplateStore(l, ns)
		if err != nil {
			return err
		}
		ts, err := openTemplateScope(store, ns, nil, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		if err != nil {
			return err
		}
		defer ts.Close()
		s := ts.book.sessions[whole]
		if len(ts.book.sessions) != 1 || s == nil || len(s.Templates) != 60 || s.Served != (memberID{7, 8}) || s.Replays != 3 || s.bytes != 1200 {
			t.Errorf("read %v", ts.book.sessions)
		}
		var k bpf.TemplatesChunkKey
		var c bpf.TemplatesChunk
		for it := ts.store.pins.Maps["store"].Iterate(); it.Next(&k, &c); {
			if k.Session != whole {
				t.Errorf("a piece of the torn session is left: %+v", k)
			}
		}
		var h bpf.TemplatesHeard
		if err := ts.store.pins.Maps["sessions"].Lookup(torn, &h); !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Errorf("the torn session's entry: %v", err)
		}
		ts.forget(whole)
		if n, _ := engine.Entries[bpf.TemplatesSession, bpf.TemplatesHeard](ts.store.pins.Maps["sessions"]); len(n) != 0 {
			t.Errorf("left: %v", n)
		}
		return nil
	})
}

// Ten thousand exporters with eight templates each: learnt, kept, and replayed
// within seconds by a member that reads.
func TestTemplatesOfManyExporters(t *testing.T) {
	n := 10000
	if testing.Short() {
		n = 1000
	}
	w := newWorld(t, spec.Options{Slots: 1, ReceiveBuffer: new(int)}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	w.apply()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	var records []byte
	var all []template
	for i := range 8 {
		r := append([]byte{1, byte(i), 0, 20}, make([]byte, 80)...)
		all = append(all, template{ID: uint16(256 + i), Record: r})
		records = append(records, r...)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	w.locked(func(l *kernel.WriteLock) error {
		store, err := openTemplateStore(l, ns)
		if err != nil {
			return err
		}
		ts, err := openTemplateScope(store, ns, nil, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		if err != nil {
			return err
		}
		defer ts.Close()
		svc := &templateService{Service: w.state()}
		ts.services = []*templateService{svc}
		for i := range n {
			from := netip.AddrFrom4([4]byte{127, 2, byte(i >> 8), byte(i)})
			ts.hear(heardMessage{ifindex: 1, session: bpf.TemplatesSession{Src: from.As16(), Dst: loopback4.Addr().As16(), Sport: 50000, Dport: 9991},
				payload: encodeTemplates(flowHeader{Version: ipfix, Domain: 1, Sequence: uint32(i)}, all)})
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if len(ts.book.sessions) != n || ts.book.templates() != 8*n {
			t.Fatalf("%d sessions with %d templates", len(ts.book.sessions), ts.book.templates())
		}
		var kernelBytes uint64
		for _, m := range ts.store.pins.Maps {
			kernelBytes += mapBytes(t, m)
		}
		t.Logf("%d exporters with %d bytes of templates each learnt in %v: %d MB of weir serve, %d MB of pinned maps", n, len(records),
			time.Since(start).Round(time.Millisecond), (after.HeapAlloc-before.HeapAlloc)>>20, kernelBytes>>20)
		return nil
	})
	r := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&r.sink)
	w.serveUntil()
	w.admitted(0, r.pid())
	start = time.Now()
	seen := map[netip.AddrPort]bool{}
	for len(seen) < n {
		if time.Since(start) > 60*time.Second {
			t.Fatalf("%d of %d exporters were replayed", len(seen), n)
		}
		time.Sleep(10 * time.Millisecond)
		for _, g := range r.received() {
			seen[g.from] = true
		}
	}
	t.Logf("replayed within %v, %d datagrams", time.Since(start).Round(time.Millisecond), len(r.received()))
}

// mapBytes is what the kernel charges for a map, bytes.
func mapBytes(t *testing.T, m *ebpf.Map) (n uint64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "memlock:"); ok {
			fmt.Sscan(rest, &n)
		}
	}
	return n
}
