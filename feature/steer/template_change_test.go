// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/ipfix/ipfixtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// TestTemplatesOfRestartedExporter restarts an exporter on another port. A collector that identifies it by address and
// domain only must not get its old templates after the new ones.
func TestTemplatesOfRestartedExporter(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	first := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&first.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	w.admitted(0, first.pid())
	deadline(t, func() bool { return time.Since(w.state().Slots[0].Since) > templates.StableAfter })
	from := sources(1)[0]
	before := newExporter(t, nil, ipfix.IPFIX, from, loopback4)
	before.sendTemplates()
	w.remembered(1, 2)
	before.conn.Close()
	after := newExporter(t, nil, ipfix.IPFIX, from, loopback4)
	after.sendTemplates()
	w.remembered(2, 4)
	first.kill()
	second := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&second.sink)
	w.admitted(0, second.pid())
	checkReplay(t, second.await(1)[0], after)
	other := newExporter(t, nil, ipfix.IPFIX, sources(2)[1], loopback4) // after its replay nothing else is in progress
	other.sendTemplates()
	w.remembered(3, 6)
	nstest.Steadily(t, 3*templates.Tick, func() error {
		for _, r := range second.received()[1:] {
			if r.from == before.addr() {
				return errors.New("the templates that the exporter had before came too")
			}
		}
		return nil
	})
}

// TestTemplatesAfterRemoval runs weir remove and weir apply beside a running weir serve.
func TestTemplatesAfterRemoval(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	r := startRecorder(t, "udp4", "0.0.0.0:9991")
	write(&r.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	e := newExporter(t, nil, ipfix.NetFlow9, sources(1)[0], loopback4)
	e.sendTemplates()
	w.remembered(1, 2)
	w.remove()
	w.apply()
	deadline(t, func() bool { // exporters repeat their templates
		e.sendTemplates()
		st, err := templates.Templates(w.state(), w.root)
		return err == nil && st.Count() == 2
	})
	// The last service removes the remembered templates.
	w.cfg.Services = nil
	w.apply()
	all, err := w.root.Instances(spec.Name)
	if err != nil || len(all) != 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}

// TestTemplatesThatCannotBeSent: a failing replay does not prevent others.
func TestTemplatesThatCannotBeSent(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp :9991")
	a := startRecorder(t, "udp", "[::]:9991")
	w.member(0, &a.sink)
	w.apply()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var ts *templates.Scope
	w.locked(func(l *kernel.WriteLock) error {
		store, err := templates.OpenStore(l, ns)
		if err != nil {
			return err
		}
		svc, err := templates.ReadServiceMembers(w.root, w.state())
		if err != nil {
			return err
		}
		ts, err = templates.OpenScope(store, ns, []*templates.Service{svc}, slog.New(slog.DiscardHandler), make(chan struct{}, 1))
		return err
	})
	defer ts.Close()
	for i := range 10 {
		from, to := sources(10)[i], loopback4.Addr()
		k := bpf.TemplatesSession{Src: from.As16(), Dst: to.As16(), Sport: 50000, Dport: 9991}
		if i%2 == 1 { // over IPv6, without a socket
			k.Src[0], k.Src[10], k.Src[11] = 0xfd, 0, 0
			k.Dst = [16]byte{15: 1}
		}
		ts.Hear(templates.HeardMessage{Session: k, Ifindex: 1, Payload: ipfix.Encode(ipfix.Header{Version: ipfix.IPFIX, Domain: 1}, ipfixtest.Templates(ipfix.IPFIX))})
	}
	for _, s := range ts.Book.Sessions { // on a slow machine the member may have had its slot for long
		s.Served = templates.MemberID{}
	}
	delete(ts.Inject.Raw, false)
	if n, _ := ts.Known(); n != 10 {
		t.Fatalf("%d exporters known", n)
	}
	if err := ts.Replay(t.Context()); err == nil {
		t.Error("no error tells of what could not be sent")
	}
	a.await(5)
	for range templates.ReplayTries - 1 {
		if !ts.Waiting() && ts.Retry.IsZero() {
			t.Fatal("it is not tried again")
		}
		ts.Replay(t.Context())
	}
	if ts.Waiting() || !ts.Retry.IsZero() {
		t.Error("it is tried without end")
	}
	if n := len(a.received()); n != 5 {
		t.Errorf("%d datagrams, want 5: the others' replays are not to be made again", n)
	}
}

// TestTemplatesWhileApplied replays templates between the publication of a service and its application, long with many
// services. They go to the previous member and must not count as received by the next one.
func TestTemplatesWhileApplied(t *testing.T) { eachEngine(t, testTemplatesWhileApplied) }

func testTemplatesWhileApplied(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	first, second := startRecorder(t, "udp4", "0.0.0.0:9991"), startRecorder(t, "udp4", "0.0.0.0:9991")
	w.member(0, &first.sink)
	w.apply()
	w.serveUntil()
	w.listening()
	w.admitted(0, first.pid())
	deadline(t, func() bool { return time.Since(w.state().Slots[0].Since) > templates.StableAfter })
	all := map[netip.Addr]*flowExporter{}
	for _, from := range sources(8) {
		all[from] = newExporter(t, nil, ipfix.IPFIX, from, loopback4)
		all[from].sendTemplates()
	}
	w.remembered(len(all), 2*len(all))
	first.await(len(all))

	w.cfg.Services[0].Slots = 2
	w.member(1, &second.sink)
	kerneltest.OnStep(func(step string) {
		if step == "steer:prepared" || step == "steer:published" {
			time.Sleep(templates.StableAfter + 5*templates.Tick) // several intervals of weir serve
		}
	})
	w.apply()
	kerneltest.OnStep(nil)
	w.admitted(1, second.pid())
	moved := 0
	for from, e := range all {
		if w.where(from)[0].Slot == 1 {
			moved++
			deadline(t, func() bool {
				return slices.ContainsFunc(second.received(), func(r received) bool { return r.from == e.addr() })
			})
		}
	}
	if moved == 0 {
		t.Error("nobody moved")
	}
}

// TestServeFinishesKilled: weir serve applies the published changes of a killed command and then replays templates.
func TestServeFinishesKilled(t *testing.T) { eachEngine(t, testServeFinishesKilled) }

func testServeFinishesKilled(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.member(0, startSink(t, "udp4=0.0.0.0:9991"))
	w.apply()
	kind, scope := w.state().Engine, w.state().PinScope
	w.locked(func(l *kernel.WriteLock) error {
		e, err := engine.OpenEngine(l, scope, kind)
		if err != nil {
			return err
		}
		defer e.Close()
		return e.Mark(true)
	})
	w.serveUntil()
	deadline(t, func() bool {
		o, err := w.root.Open(record.EngineInstance(scope, kind), "sync")
		if err != nil {
			return false
		}
		defer o.Close()
		under, err := engine.IsMarked(o.Maps)
		return err == nil && !under
	})
}
