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
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestSessionIsBounded(t *testing.T) {
	s := &templates.FlowSession{}
	var err error
	for i := range 2 * templates.MaxSessionTemplates {
		id := uint16(ipfix.MinTemplateID + i)
		record := append(binary.BigEndian.AppendUint16(nil, id), 0, 1, 0, 8, 0, 4)
		_, perr := s.Apply([]ipfix.Change{{Template: &ipfix.Template{ID: id, Record: record}}})
		err = errors.Join(err, perr)
	}
	if len(s.Templates) != templates.MaxSessionTemplates || !errors.Is(err, templates.ErrNoRoom) {
		t.Errorf("%d templates: %v", len(s.Templates), err)
	}
	if n, err := s.Apply([]ipfix.Change{{Template: &ipfix.Template{ID: 300, Record: []byte{1, 44, 0, 1, 0, 12, 0, 4}}}}); n != 1 || err != nil {
		t.Errorf("a change of a template that is there: %d, %v", n, err)
	}
	if n, err := s.Apply([]ipfix.Change{{Withdrawn: &ipfix.Withdrawal{ID: 2, All: true}}}); n != templates.MaxSessionTemplates || err != nil || s.Bytes != 0 {
		t.Errorf("all withdrawn: %d, %v, %d bytes left", n, err, s.Bytes)
	}
	for i := range 100 {
		s.Put(ipfix.Template{ID: uint16(300 + i), Record: make([]byte, ipfix.MaxTemplateBytes)})
	}
	if s.Bytes > templates.MaxSessionBytes || s.Bytes < templates.MaxSessionBytes-ipfix.MaxTemplateBytes {
		t.Errorf("%d bytes, the most should be %d", s.Bytes, templates.MaxSessionBytes)
	}
}

// Forged exporters that send once do not push out those that go on.
func TestRoomIsMadeOfTheSilent(t *testing.T) {
	b := templates.NewTemplateBook()
	key := func(i int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).As16(), Domain: uint32(i)}
	}
	for i := range templates.MaxSessions + 1 {
		b.Add(key(i), &templates.FlowSession{Bytes: 10, Proven: true})
	}
	if c := b.Crowded(key(0).Src); c != templates.CrowdAll {
		t.Errorf("crowd %d", c)
	}
	// The first thousand are heard all the time.
	gone := b.Silent(templates.CrowdAll, key(templates.MaxSessions), func(k bpf.TemplatesSession) uint64 {
		if k.Domain < 1000 {
			return 1e9
		}
		return uint64(k.Domain)
	})
	for _, k := range gone {
		if k.Domain < 1000 || k.Domain > 1000+templates.MaxSessions/templates.CrowdShare {
			t.Fatalf("session %d goes", k.Domain)
		}
		b.Remove(k)
	}
	if c := b.Crowded(key(0).Src); c != templates.CrowdNone || b.Bytes != (10+templates.SessionBytes)*len(b.Sessions) {
		t.Errorf("%d sessions, %d bytes, crowd %d", len(b.Sessions), b.Bytes, c)
	}
	src := key(5).Src
	for i := range templates.MaxSessionsOfAddress {
		b.Add(bpf.TemplatesSession{Src: src, Sport: uint16(i + 1)}, &templates.FlowSession{})
	}
	one := b.Silent(templates.CrowdAddress, key(5), func(k bpf.TemplatesSession) uint64 { return uint64(k.Sport) })
	if c := b.Crowded(src); c != templates.CrowdAddress || len(one) != templates.MaxSessionsOfAddress/templates.CrowdShare+1 || one[0].Src != src || one[0].Sport != 1 {
		t.Errorf("of one address: crowd %d, %v", c, one)
	}
}

// What a session, an address, newcomers and all take is bounded, whatever grows; the proven stay.
func TestBookIsBounded(t *testing.T) {
	b := templates.NewTemplateBook()
	last := func(k bpf.TemplatesSession) uint64 { return uint64(k.Domain) }
	key := func(address, domain int) bpf.TemplatesSession {
		return bpf.TemplatesSession{Src: netip.AddrFrom4([4]byte{10, byte(address >> 16), byte(address >> 8), byte(address)}).As16(), Domain: uint32(domain)}
	}
	enter := func(k bpf.TemplatesSession, records, size int) *templates.FlowSession {
		s := &templates.FlowSession{}
		b.Add(k, s)
		before := s.Size()
		for i := range records {
			if _, err := s.Put(ipfix.Template{ID: uint16(256 + i), Record: make([]byte, size)}); err != nil {
				t.Fatal(err)
			}
		}
		b.Grown(k, s, before)
		for c := b.Crowded(k.Src); c != templates.CrowdNone; c = b.Crowded(k.Src) {
			for _, gone := range b.Silent(c, k, last) {
				b.Remove(gone)
			}
		}
		return s
	}
	for i := range 1000 {
		b.Prove(enter(key(0xff0000+i, 0), 8, 60)) // silent longest of all
	}
	proven := b.Bytes
	for domain := range 1000 {
		enter(key(1, domain), 15, 1000)
		if u := b.Of[key(1, 0).Src]; u.Bytes > templates.MaxAddressBytes || u.Sessions > templates.MaxSessionsOfAddress {
			t.Fatalf("an address has %+v", *u)
		}
	}
	for i := range 3 * templates.MaxNewcomers {
		enter(key(2+i, i), 1, 1300)
		if b.Newcomers.Bytes > templates.MaxNewcomerBytes || b.Newcomers.Sessions > templates.MaxNewcomers || b.Bytes > templates.MaxBookBytes {
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
	if len(b.Sessions) != 1000 || b.Bytes != proven || b.Newcomers != (templates.BookUse{}) || sum < templates.MaxNewcomerBytes/2 {
		t.Errorf("left %d sessions of %d bytes, newcomers %+v; before %d bytes, in all %d", len(b.Sessions), b.Bytes, b.Newcomers, proven, sum)
	}
}

func TestNextSequence(t *testing.T) {
	s := &templates.FlowSession{Templates: []ipfix.Template{{ID: 260, Record: exampleRecord}, {ID: 262, Record: []byte{1, 6, 0, 1, 0, 82, 0xff, 0xff}}}}
	heard := func(sets ...ipfix.Set) bpf.TemplatesHeard {
		m := ipfix.Message{Header: ipfix.Header{Sequence: 0xfffffffe}, Sets: sets}
		return templates.HeardAs(&m, 1, 1)
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
		{ipfix.IPFIX, heard(ipfix.Set{ID: 260, Length: 4 + 12*3 + 2}), 1, true}, // padded, and beyond the last number
		{ipfix.IPFIX, heard(ipfix.Set{ID: 260, Length: 16}, ipfix.Set{ID: 260, Length: 16}), 0, true},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 262, Length: 40}), 0xfffffffe, false},
		{ipfix.IPFIX, heard(ipfix.Set{ID: 999, Length: 40}, ipfix.Set{ID: 260, Length: 16}), 0xffffffff, false},
		{ipfix.IPFIX, heard(make([]ipfix.Set, 9)...), 0xfffffffe, false},
	} {
		if next, exact := s.NextSequence(bpf.TemplatesSession{Version: c.version}, c.h); next != c.want || exact != c.exact {
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
	whole, torn := bpf.TemplatesSession{Domain: 1, Version: ipfix.IPFIX}, bpf.TemplatesSession{Domain: 2, Version: ipfix.IPFIX}
	w.locked(func(l *kernel.WriteLock) error {
		st, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		defer st.Close()
		s := &templates.FlowSession{Served: templates.MemberID{Tgid: 7, Start: 8}, Replays: 3}
		for i := range 60 { // more than one chunk
			s.Put(ipfix.Template{ID: uint16(300 + i), Record: make([]byte, 20)})
		}
		if err := st.Save(whole, s); err != nil {
			return err
		}
		s.Generation, s.Chunks = 0, 0
		if err := st.Save(torn, s); err != nil {
			return err
		}
		if s.Chunks < 2 {
			t.Fatalf("%d chunks", s.Chunks)
		}
		s.Generation++ // the first piece of the next writing
		if err := st.Save(torn, &templates.FlowSession{Generation: s.Generation, Templates: s.Templates[:3]}); err != nil {
			return err
		}
		return st.Enter(torn, bpf.TemplatesHeard{})
	})
	w.locked(func(l *kernel.WriteLock) error {
		store, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		ts, err := templates.OpenScope(store, ns, nil, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		if err != nil {
			return err
		}
		defer ts.Close()
		s := ts.Book.Sessions[whole]
		if len(ts.Book.Sessions) != 1 || s == nil || len(s.Templates) != 60 || s.Served != (templates.MemberID{Tgid: 7, Start: 8}) || s.Replays != 3 || s.Bytes != 1200 {
			t.Errorf("read %v", ts.Book.Sessions)
		}
		var k bpf.TemplatesChunkKey
		var c bpf.TemplatesChunk
		for it := ts.Store.Pins.Maps["store"].Iterate(); it.Next(&k, &c); {
			if k.Session != whole {
				t.Errorf("a piece of the torn session is left: %+v", k)
			}
		}
		var h bpf.TemplatesHeard
		if err := ts.Store.Pins.Maps["sessions"].Lookup(torn, &h); !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Errorf("the torn session's entry: %v", err)
		}
		ts.Forget(whole)
		if n, _ := engine.Entries[bpf.TemplatesSession, bpf.TemplatesHeard](ts.Store.Pins.Maps["sessions"]); len(n) != 0 {
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
	var all []ipfix.Template
	for i := range 8 {
		r := append([]byte{1, byte(i), 0, 20}, make([]byte, 80)...)
		all = append(all, ipfix.Template{ID: uint16(256 + i), Record: r})
		records = append(records, r...)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	w.locked(func(l *kernel.WriteLock) error {
		store, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		ts, err := templates.OpenScope(store, ns, nil, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		if err != nil {
			return err
		}
		defer ts.Close()
		svc := &templates.Service{Service: w.state()}
		ts.Services = []*templates.Service{svc}
		for i := range n {
			from := netip.AddrFrom4([4]byte{127, 2, byte(i >> 8), byte(i)})
			ts.Hear(templates.HeardMessage{Ifindex: 1, Session: bpf.TemplatesSession{Src: from.As16(), Dst: loopback4.Addr().As16(), Sport: 50000, Dport: 9991},
				Payload: ipfix.Encode(ipfix.Header{Version: ipfix.IPFIX, Domain: 1, Sequence: uint32(i)}, all)})
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if len(ts.Book.Sessions) != n || ts.Book.Templates() != 8*n {
			t.Fatalf("%d sessions with %d templates", len(ts.Book.Sessions), ts.Book.Templates())
		}
		var kernelBytes uint64
		for _, m := range ts.Store.Pins.Maps {
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
	nstest.Eventually(t, func() error {
		for _, g := range r.received() {
			seen[g.from] = true
		}
		if len(seen) < n {
			return fmt.Errorf("%d of %d exporters were replayed", len(seen), n)
		}
		return nil
	})
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
