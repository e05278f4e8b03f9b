// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// serveUntil runs the watcher until the returned function is called or the test ends.
func (w *world) serveUntil() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(w.t.Output(), nil))) }() // logs to the output of a failing test
	var stopped bool
	stop = func() {
		cancel()
		if stopped {
			return
		}
		stopped = true
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(stop)
	return stop
}

// remembered waits until the given number of exporters and templates are remembered.
func (w *world) remembered(n, list int) templates.TemplateState {
	w.t.Helper()
	var st templates.TemplateState
	nstest.Eventually(w.t, func() error {
		var err error
		if st, err = templates.Templates(w.state(), w.root); err != nil {
			w.t.Fatal(err)
		}
		if len(st.Exporters) != n || st.Count() != list {
			return fmt.Errorf("remembered: %+v, want %d exporters with %d templates", st, n, list)
		}
		return nil
	})
	return st
}

// listening waits until the capture of templates runs.
func (w *world) listening() {
	w.t.Helper()
	deadline(w.t, func() bool {
		b, err := os.ReadFile("/proc/thread-self/net/packet")
		if err != nil {
			w.t.Fatal(err)
		}
		return strings.Contains(string(b), " 0800 ") && strings.Contains(string(b), " 86dd ")
	})
}

// checkReplay checks that a message replays the example templates without a sequence gap to the exporter's next
// message.
func checkReplay(t *testing.T, r received, e *flowExporter) {
	t.Helper()
	m, err := ipfix.Parse(r.payload)
	if err != nil {
		t.Fatalf("%x: %v", r.payload, err)
	}
	if r.from != e.addr() {
		t.Errorf("the replay comes from %s, want %s", r.from, e.addr())
	}
	want := e.seq
	if e.version == ipfix.NetFlow9 {
		want-- // NetFlow v9 counts messages
		if n := int(r.payload[2])<<8 | int(r.payload[3]); n != 2 {
			t.Errorf("the header counts %d records, want 2", n)
		}
	}
	if m.Version != e.version || m.Domain != e.domain || m.Sequence != want {
		t.Errorf("header %+v, want version %d, domain %d, sequence %d", m.Header, e.version, e.domain, want)
	}
	var got []ipfix.Template
	for _, c := range m.Changes {
		got = append(got, *c.Template)
	}
	if !slices.EqualFunc(got, ipfixtest.Templates(e.version), ipfix.Template.Equal) {
		t.Errorf("templates %v, want %v", got, ipfixtest.Templates(e.version))
	}
}

// TestTemplatesAreReplayed sends templates once and replaces the collector. The new collector gets them at once, from
// the exporter's own address and port.
func TestTemplatesAreReplayed(t *testing.T) {
	lo4, lo6 := sources(1)[0], netip.MustParseAddr("::1")
	veth4, veth6 := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00:1:0::2")
	for _, c := range []struct {
		name     string
		version  uint16
		from, to netip.Addr
		engine   spec.Engine
	}{
		{"ipfix loopback IPv4", ipfix.IPFIX, lo4, netip.MustParseAddr("127.0.0.1"), spec.EngineSkLookup},
		{"netflow9 loopback IPv6", ipfix.NetFlow9, lo6, lo6, spec.EngineReuseport},
		{"netflow9 cable IPv4", ipfix.NetFlow9, veth4, netip.MustParseAddr("10.1.0.1"), spec.EngineReuseport},
		{"ipfix cable IPv6", ipfix.IPFIX, veth6, netip.MustParseAddr("fd00:1:0::1"), spec.EngineSkLookup},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 1, Engine: c.engine}, "udp [::]:9991")
			write := w.byPIDFile(0)
			first := startRecorder(t, "udp", "[::]:9991")
			write(&first.sink)
			w.apply()
			ns := cable(t)
			if c.from.IsLoopback() {
				ns = nil
			}
			w.serveUntil()
			w.listening()
			w.admitted(0, first.pid())
			deadline(t, func() bool { return time.Since(w.state().Slots[0].Since) > templates.StableAfter }) // it has heard all, so no replay is pending
			e := newExporter(t, ns, c.version, c.from, netip.AddrPortFrom(c.to, 9991))
			e.sendTemplates()
			e.sendData(3)
			w.remembered(1, 2)
			e.sendData(2)
			first.await(3)
			first.kill()
			e.sendData(5) // lost, but the sequence continues
			second := startRecorder(t, "udp", "[::]:9991")
			write(&second.sink)
			took := w.admitted(0, second.pid())
			start := time.Now()
			got := second.await(1)
			t.Logf("admitted after %v, replayed %v later", took, time.Since(start))
			checkReplay(t, got[0], e)
			e.sendData(1)
			second.await(2)
			deadline(t, func() bool { st := w.remembered(1, 2); return st.Replayed > 0 && st.Exporters[0].Replays > 0 }) // recorded after they were sent
			st := w.remembered(1, 2)
			if x := st.Exporters[0]; x.Replays == 0 || x.Replayed.IsZero() || x.Address != e.addr() || x.Messages < 4 || x.Domain != 7 {
				t.Errorf("state %+v", x)
			}
		})
	}
}

// TestReplayIsNoSign: a replay does not make a silent exporter look alive.
func TestReplayIsNoSign(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	first := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&first.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	w.admitted(0, first.pid())
	e := newExporter(t, nil, ipfix.IPFIX, sources(1)[0], loopback4)
	e.sendTemplates()
	w.remembered(1, 2)
	e.sendData(1)
	first.await(2)
	sent := time.Now()
	last := func() time.Time {
		t.Helper()
		answer, err := answerDevices(w.root, w.state(), nil)
		if err != nil {
			t.Fatal(err)
		}
		d := answer.(DeviceReport).Devices
		if len(d) != 1 || d[0].Last != d[0].LastUDP {
			t.Fatalf("devices %+v", d)
		}
		return d[0].Last
	}
	first.kill()
	nstest.Until(t, "the exporter is silent", func() bool { return time.Since(sent) > 2*time.Second })
	second := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&second.sink)
	w.admitted(0, second.pid())
	second.await(1)
	deadline(t, func() bool { return w.remembered(1, 2).Exporters[0].Replays > 0 })
	if got := last(); got.Sub(sent) > time.Second {
		t.Errorf("silent since %v, and last seen %v later", sent, got.Sub(sent))
	}
	again := time.Now()
	e.sendData(1)
	second.await(2)
	if got := last(); got.Before(again.Add(-time.Second)) {
		t.Errorf("it sent again at %v, and was last seen at %v", again, got)
	}
}

// TestTemplatesOutliveServe: remembered templates outlive weir serve, and a member gets one replay.
func TestTemplatesOutliveServe(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	first := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&first.sink)
	w.apply()
	stop := w.serveUntil()
	w.listening()
	w.admitted(0, first.pid())
	e := newExporter(t, nil, ipfix.IPFIX, sources(1)[0], loopback4)
	e.sendTemplates()
	w.remembered(1, 2)
	e.sendData(1)
	first.await(2)
	stop()
	first.kill()
	second := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&second.sink)
	stop = w.serveUntil()
	w.admitted(0, second.pid())
	checkReplay(t, second.await(1)[0], e)
	deadline(t, func() bool { return w.remembered(1, 2).Exporters[0].Replays > 0 })
	stop()
	replays := w.remembered(1, 2).Exporters[0].Replays
	w.serveUntil() // the same member: it has them
	e.sendData(4)
	second.await(2)
	nstest.Steadily(t, 5*templates.Tick, func() error {
		if got := second.received(); len(got) != 2 {
			return fmt.Errorf("%d datagrams, want a replay and a message of data", len(got))
		}
		return nil
	})
	if n := w.remembered(1, 2).Exporters[0].Replays; n != replays {
		t.Errorf("%d replays, want %d", n, replays)
	}
}

// TestTemplatesChangedInAbsence: a member gets a template it missed: the template changed while its slot was withdrawn.
func TestTemplatesChangedInAbsence(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	r := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&r.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	w.admitted(0, r.pid())
	e := newExporter(t, nil, ipfix.IPFIX, sources(1)[0], loopback4)
	slot := slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 0}
	w.locked(func(l *kernel.WriteLock) error { return engine.Withdraw(l, slot) })
	e.sendTemplates()
	w.remembered(1, 2)
	if got := r.received(); len(got) != 0 {
		t.Fatalf("%d datagrams came to a withdrawn slot", len(got))
	}
	w.locked(func(l *kernel.WriteLock) error {
		_, err := engine.AdmitLocked(t.Context(), l, slot, nil, nil)
		return err
	})
	checkReplay(t, r.await(1)[0], e)
	e.send(0, ipfixtest.Set(2, 1, 4, 0, 0)) // template 260 is withdrawn
	w.remembered(1, 1)
	e.send(0, ipfixtest.Set(3, 0, 3, 0, 0)) // all options templates are withdrawn
	w.remembered(0, 0)
}

// TestTemplatesFollowDevices: new slots get the templates of their devices.
func TestTemplatesFollowDevices(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	a, b := startRecorder(t, "udp4", "0.0.0.0:9991"), startRecorder(t, "udp4", "0.0.0.0:9991")
	w.member(0, &a.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	w.admitted(0, a.pid())
	// After this time the member certainly received every message.
	deadline(t, func() bool { return time.Since(w.state().Slots[0].Since) > templates.StableAfter })
	exporters := map[netip.AddrPort]*flowExporter{}
	for _, from := range sources(40) {
		e := newExporter(t, nil, ipfix.NetFlow9, from, loopback4)
		e.sendTemplates()
		exporters[e.addr()] = e
	}
	w.remembered(40, 80)
	a.await(40)
	w.cfg.Services[0].Slots = 2
	w.member(1, &b.sink)
	w.apply()
	moved := 0
	for _, p := range w.where(sources(40)...) {
		moved += p.Slot
	}
	if moved == 0 || moved == 40 {
		t.Fatalf("%d of 40 devices moved", moved)
	}
	for _, r := range b.await(moved) {
		checkReplay(t, r, exporters[r.from])
	}
	nstest.Steadily(t, 3*templates.Tick, func() error {
		if n := len(b.received()); n != moved {
			return fmt.Errorf("%d replays for %d devices that moved", n, moved)
		}
		return nil
	})
	for _, r := range a.received()[40:] {
		t.Errorf("a device that stayed was replayed: %v", r.from)
	}
}

// TestTemplatesLetNamespacesGo: the capture does not keep a container's namespace.
func TestTemplatesLetNamespacesGo(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	ns, err := netns.Create("shortlived")
	if err != nil {
		t.Fatal(err)
	}
	var r *recorder
	err = ns.Do(func() error { r = startRecorder(t, "udp4", "0.0.0.0:9991"); return nil })
	if err != nil {
		t.Fatal(err)
	}
	write(&r.sink)
	w.cfg.Services[0].Netns = "shortlived"
	w.apply()
	w.serveUntil()
	if err := ns.Do(func() error { w.listening(); return nil }); err != nil {
		t.Fatal(err)
	}
	w.admitted(0, r.pid())
	r.kill()
	ns.Close()
	if err := netns.Delete("shortlived"); err != nil {
		t.Fatal(err)
	}
	deadline(t, func() bool {
		w.locked(engine.CleanStale) // it asks the kernel
		all, err := w.root.Instances(spec.Name)
		return err == nil && len(all) == 0
	})
}
