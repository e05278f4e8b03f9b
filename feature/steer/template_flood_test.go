// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"log/slog"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// TestTemplateFlood: a flooding exporter is limited to its budget. The state counts the refused messages, and other
// exporters are remembered.
func TestTemplateFlood(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.apply()
	w.serveUntil()
	w.listening()
	flood := newExporter(t, nil, ipfix.IPFIX, sources(1)[0], loopback4)
	const messages = 3000
	start := time.Now()
	for range messages {
		flood.sendTemplates()
	}
	other := newExporter(t, nil, ipfix.IPFIX, sources(2)[1], loopback4)
	other.sendTemplates()
	passed := 1024 + 1 + 32*int(time.Since(start).Seconds()+1) // maximum
	var st templates.TemplateState
	deadline(t, func() bool { // counters are written with a delay
		st = w.remembered(2, 4)
		return st.Refused >= uint64(messages-passed)
	})
	if st.Refused > messages {
		t.Errorf("%d messages refused of %d", st.Refused, messages)
	}
}

// TestNewcomersAreProven: sessions heard for a while are proven and replayed first.
func TestNewcomersAreProven(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	r := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&r.sink)
	w.apply()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	w.locked(func(l *kernel.WriteLock) error {
		store, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		svc, err := templates.ReadServiceMembers(l.Root, w.state())
		if err != nil {
			return err
		}
		ts, err := templates.OpenScope(store, ns, []*templates.Service{svc}, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		if err != nil {
			return err
		}
		defer ts.Close()
		keys := [3]bpf.TemplatesSession{}
		for i := range keys {
			m := templates.HeardMessage{Ifindex: 1, Session: bpf.TemplatesSession{Src: sources(3)[i].As16(), Dst: loopback4.Addr().As16(), Sport: 50000, Dport: 9991},
				Payload: ipfix.Encode(ipfix.Header{Version: ipfix.IPFIX, Domain: 1}, ipfixtest.Templates(ipfix.IPFIX))}
			ts.Hear(m)
			keys[i] = m.Session
			keys[i].Version, keys[i].Domain = ipfix.IPFIX, 1
			s := ts.Book.Sessions[keys[i]]
			if s == nil {
				t.Fatalf("session %d is not remembered", i)
			}
			s.Served = templates.MemberID{} // due
		}
		now := kernel.Monotonic()
		ts.Book.Sessions[keys[0]].Born = now - 2*uint64(templates.ProvenAge)
		ts.Book.Sessions[keys[1]].Born = now - 2*uint64(templates.ProvenAge)
		for i, messages := range []uint64{templates.ProvenMessages, templates.ProvenMessages - 1, 100 * templates.ProvenMessages} {
			if err := store.Pins.Maps["sessions"].Put(keys[i], bpf.TemplatesHeard{Messages: messages, Last: now + uint64(i)}); err != nil {
				return err
			}
		}
		ts.Prove()
		for i, want := range []bool{true, false, false} { // long enough, too rarely, too short
			if got := ts.Book.Sessions[keys[i]].Proven; got != want {
				t.Errorf("session %d: proven %v, want %v", i, got, want)
			}
		}
		due := ts.Due()
		if len(due) != 1 || len(due[0].Sessions) != 3 || due[0].Sessions[0].Key != keys[0] || due[0].Sessions[1].Key != keys[2] {
			t.Errorf("replayed %+v, want the proven session, then those heard last", due)
		}
		return nil
	})
}
