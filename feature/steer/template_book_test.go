// SPDX-License-Identifier: Apache-2.0

package steer

import (
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

// TestTemplateStoreIsMended: an incomplete session of a killed writer is not read, and the next writer removes it.
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
		s.Generation++ // first chunk of the next generation
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

// TestTemplatesOfManyExporters learns, keeps and replays eight templates of each of ten thousand exporters. A reading
// member gets them within seconds.
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

// mapBytes returns the memory charged for a map in bytes.
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
