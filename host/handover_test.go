// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// routed is the address of a service. Its members get numbered messages of 8 bytes from routers over UDP and TCP: the last
// byte of the router's address, and a number. They log each processed message with its time.
const routed = "127.0.0.1:4741"

func message(router byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte{router, 0, 0, 0}, n)
}

// playRouted is a member with TCP and UDP of the same routers and with session handover: KEEPER NAME LOG PIDFILE PAUSE.
// It holds its slot for PAUSE before it accepts sessions.
func playRouted(f []string) error {
	ctx := context.Background()
	o := handoff.Options{Service: "telemetry", Name: f[1], Keeper: f[0]}
	o.Listen.Control = func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(cerr, err)
	}
	log, err := os.OpenFile(f[2], os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	note := func(proto string, b []byte, at time.Time) {
		fmt.Fprintln(log, proto, b[0], binary.BigEndian.Uint32(b[4:]), at.UnixNano(), f[1])
	}
	m, err := handoff.Join(ctx, o)
	if err != nil {
		return err
	}
	p, err := m.ListenPacket(ctx, "udp4", routed)
	if err != nil {
		return err
	}
	l, err := m.Listen(ctx, "tcp4", routed)
	if err != nil {
		return err
	}
	pause, err := time.ParseDuration(f[4])
	if err == nil {
		err = os.WriteFile(f[3], fmt.Append(nil, os.Getpid(), "\n"), 0o644)
	}
	if err != nil {
		return err
	}
	time.Sleep(pause)
	if err := m.Ready(); err != nil {
		return err
	}
	fmt.Println("ready")
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	go func() {
		b := make([]byte, 100)
		for {
			if n, _, err := p.ReadFrom(b); err != nil || n != 8 {
				return
			}
			note("udp", b, time.Now())
		}
	}()
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return err
		}
		go serveRouted(s, note)
	}
}

func serveRouted(s *handoff.Session, note func(string, []byte, time.Time)) {
	next := uint32(0)
	if st := s.State(); len(st) == 4 {
		next = binary.BigEndian.Uint32(st)
	}
	var in []byte
	b := make([]byte, 100)
	for {
		n, err := s.Read(b)
		if err != nil {
			if errors.Is(err, io.EOF) {
				s.Close()
			}
			return
		}
		in = append(in, b[:n]...)
		done := in
		for ; len(in) >= 8; in = in[8:] {
			if got := binary.BigEndian.Uint32(in[4:]); got != next {
				note("gap", in, time.Now()) // lost, duplicated or changed
			}
			next++
		}
		in = append([]byte(nil), in...)
		// The next owner repeats uncommitted work: a message counts as processed only after its commit.
		at := time.Now()
		if s.CommitExcept(len(in), binary.BigEndian.AppendUint32(nil, next)) != nil {
			return
		}
		for ; len(done) >= 8; done = done[8:] {
			note("tcp", done, at)
		}
	}
}

// router sends to the service over both protocols from its own address.
type router struct {
	id   byte
	tcp  *net.TCPConn
	udp  *net.UDPConn
	sent [2][]int64 // send times by number: TCP, UDP
	err  error
}

func newRouter(t *testing.T, id byte) *router {
	t.Helper()
	from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, id}), 0)
	to := netip.MustParseAddrPort(routed)
	tcp, err := net.DialTCP("tcp4", net.TCPAddrFromAddrPort(from), net.TCPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	return &router{id: id, tcp: tcp, udp: udp}
}

func (r *router) run(stop *atomic.Bool) {
	for n := uint32(0); !stop.Load(); n++ {
		for proto, c := range []net.Conn{r.tcp, r.udp} {
			r.sent[proto] = append(r.sent[proto], time.Now().UnixNano())
			if _, err := c.Write(message(r.id, n)); err != nil {
				r.err = fmt.Errorf("router %d, message %d: %w", r.id, n, err)
				return
			}
		}
		time.Sleep(time.Duration(rand.IntN(1500)) * time.Microsecond)
	}
}

// processed is a line of a member's log.
type processed struct {
	proto  string
	router byte
	n      int
	at     int64
	member string
}

func readProcessed(t *testing.T, paths ...string) (out []processed) {
	t.Helper()
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !strings.HasSuffix(line, "\n") {
				break // a partial line
			}
			var p processed
			if _, err := fmt.Sscan(line, &p.proto, &p.router, &p.n, &p.at, &p.member); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			out = append(out, p)
		}
	}
	return out
}

// steered is a service of two members with session handover.
type steered struct {
	world
	s       *serving
	members [2]*nstest.Process
	logs    [2]string
	text    string
	pause   time.Duration // pause of starting members
}

func newSteered(t *testing.T) *steered {
	w := &steered{world: newWorld(t)}
	was := bufferLimit
	t.Cleanup(func() { bufferLimit = was })
	bufferLimit = 2 * time.Second // the keeper's own limit is 3 s
	dir := t.TempDir()
	w.s = w.serve()
	w.text = fmt.Sprintf(`
services:
  telemetry:
    listen: [udp %[1]s, tcp %[1]s]
    steer: {slots: 2, seed: 7, reset_rate: 1000/s}
    members:
      - {slot: 0, pidfile: %[2]s/0.pid}
      - {slot: 1, pidfile: %[2]s/1.pid}
`, routed, dir)
	for i := range w.members {
		w.logs[i] = filepath.Join(dir, fmt.Sprint(i))
		w.start(i)
	}
	w.apply(w.config("%s", w.text))
	for i, m := range w.members {
		w.slotIs(i, m.PID())
	}
	return w
}

// start starts a member.
func (w *steered) start(i int) {
	w.t.Helper()
	pidfile := filepath.Join(filepath.Dir(w.logs[i]), fmt.Sprint(i, ".pid"))
	w.members[i] = nstest.StartReady(w.t, nstest.Child("routed", w.s.handoff, i, w.logs[i], pidfile, w.pause))
}

// processing waits until members have each router's connection and have processed some of its messages.
func (w *steered) processing(routers []*router) {
	w.t.Helper()
	nstest.Until(w.t, "members process what each router sends", func() bool {
		has := map[byte]bool{}
		for _, p := range readProcessed(w.t, w.logs[:]...) {
			has[p.router] = has[p.router] || p.proto == "tcp"
		}
		for _, r := range routers {
			if !has[r.id] {
				return false
			}
		}
		return true
	})
}

// processedMore waits until the members have processed this many more messages of each router.
func (w *steered) processedMore(routers []*router, more int) {
	w.t.Helper()
	count := func() map[byte]int {
		n := map[byte]int{}
		for _, p := range readProcessed(w.t, w.logs[:]...) {
			n[p.router]++
		}
		return n
	}
	before := count()
	nstest.Eventually(w.t, func() error {
		now := count()
		for _, r := range routers {
			if n := now[r.id] - before[r.id]; n < more {
				return fmt.Errorf("%d messages of router %d were processed, want %d", n, r.id, more)
			}
		}
		return nil
	})
}

// processedAll waits until the members have processed all messages of the routers, and then for duplicates.
func (w *steered) processedAll(routers []*router) {
	w.t.Helper()
	_ = nstest.Poll(30*time.Second, func() error {
		last := map[string]int{}
		for _, p := range readProcessed(w.t, w.logs[:]...) {
			key := fmt.Sprint(p.proto, p.router)
			last[key] = max(last[key], p.n+1)
		}
		missing := 0
		for _, r := range routers {
			missing += max(len(r.sent[0])-last[fmt.Sprint("tcp", r.id)], 0) + max(len(r.sent[1])-last[fmt.Sprint("udp", r.id)], 0)
		}
		if missing > 0 {
			return fmt.Errorf("%d are missing", missing)
		}
		return nil // missing earlier messages are judged later
	})
	time.Sleep(200 * time.Millisecond)
}

// moved makes a change like the commands. It returns the number of sessions handed over during the change, after it, and
// reset.
func (w *steered) moved(foresee func() ([]steer.Foreseen, error), change func() error) (with, after, doReset int) {
	w.t.Helper()
	if err := steer.Switch(w.t.Context(), w.Root, Mover(w.s.handoff), foresee, change, func(steer.Handed) { with++ }); err != nil {
		w.t.Fatal(err)
	}
	if err := reset.ResetDue(w.t.Context(), w.Root, nil, steer.HandBy(Mover(w.s.handoff)), func(r reset.Reset) {
		if r.Handed {
			after++
		} else {
			w.t.Logf("reset: %s %s %v", r.Router(), r.Slots(), r.Err)
			doReset++
		}
	}); err != nil {
		w.t.Fatal(err)
	}
	return with, after, doReset
}

func (w *steered) service() *state.Service {
	w.t.Helper()
	s, err := w.state().Service("telemetry")
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *steered) move(m record.Moving) (with, after, reset int) {
	w.t.Helper()
	s := w.service()
	return w.moved(func() ([]steer.Foreseen, error) {
		f, err := steer.ForeseeMove(w.t.Context(), w.Root, s, m)
		return []steer.Foreseen{f}, err
	}, func() error {
		return w.locked(func(l *kernel.WriteLock) error { return engine.Move(l, s.Scope(), s.Name, m, nil) })
	})
}

func (w *steered) locked(f func(l *kernel.WriteLock) error) error {
	l, err := w.Root.Lock(w.t.Context())
	if err != nil {
		return err
	}
	defer l.Unlock()
	return f(l)
}

func (w *steered) drain(slot int, back bool) (with, after, reset int) {
	w.t.Helper()
	s := w.service()
	named := slots.Slot{Scope: s.Scope(), Service: s.Name, Slot: slot}
	return w.moved(func() ([]steer.Foreseen, error) {
		f, err := steer.ForeseeDrain(w.t.Context(), w.Root, s, slot, back)
		return []steer.Foreseen{f}, err
	}, func() error {
		return w.locked(func(l *kernel.WriteLock) error {
			if back {
				return engine.Undrain(l, named, nil)
			}
			return engine.Drain(l, named, nil)
		})
	})
}

// Routers move between the members' slots while they send. Their sessions move along to the exact byte, and all messages
// of a router are at one member.
func TestSessionsGoWithTheirRouters(t *testing.T) {
	w := newSteered(t)
	var routers []*router
	for id := range 6 {
		routers = append(routers, newRouter(t, byte(10+id)))
	}
	var stop atomic.Bool
	var running sync.WaitGroup
	for _, r := range routers {
		running.Go(func() { r.run(&stop) })
	}
	w.processing(routers)
	slot := func(r *router) int {
		p, err := w.service().Where(state.WhatIf{}, netip.AddrFrom4([4]byte{127, 0, 1, r.id}))
		if err != nil {
			t.Fatal(err)
		}
		return p[0].Slot
	}
	moves := 20
	if testing.Short() {
		moves = 6
	}
	switches := map[byte][]int64{}
	for i := range moves {
		r := routers[i%len(routers)]
		to := 1 - slot(r)
		with, after, reset := w.move(record.Moving{Device: fmt.Sprint("127.0.1.", r.id), To: to})
		if with != 1 || after+reset != 0 {
			t.Fatalf("move %d of router %d: %d sessions went along, %d followed, %d were reset", i, r.id, with, after, reset)
		}
		switches[r.id] = append(switches[r.id], time.Now().UnixNano())
		time.Sleep(time.Duration(rand.IntN(10_000)) * time.Microsecond)
	}
	// All of a slot at once, and back.
	held := map[int]int{}
	for _, r := range routers {
		held[slot(r)]++
	}
	if with, after, reset := w.drain(1, false); with != held[1] || after+reset != 0 {
		t.Errorf("drained: %d of %d sessions went along, %d followed, %d were reset", with, held[1], after, reset)
	}
	w.processedMore(routers, 20)
	if with, after, reset := w.drain(1, true); with != held[1] || after+reset != 0 {
		t.Errorf("undrained: %d of %d sessions went along, %d followed, %d were reset", with, held[1], after, reset)
	}
	w.processedMore(routers, 20)
	stop.Store(true)
	running.Wait()
	w.processedAll(routers)
	for _, r := range routers {
		if r.err != nil {
			t.Error(r.err)
		}
		r.judge(t, readProcessed(t, w.logs[:]...))
	}
}

// judge checks that every message was processed once, in order, and at the right member.
func (r *router) judge(t *testing.T, all []processed) {
	t.Helper()
	var tcp, udp []processed // by number
	for _, p := range all {
		switch {
		case p.router != r.id:
		case p.proto == "gap":
			t.Errorf("router %d: a gap before message %d at member %s", r.id, p.n, p.member)
		case p.proto == "tcp":
			tcp = append(tcp, p)
		default:
			udp = append(udp, p)
		}
	}
	sortByNumber(tcp)
	sortByNumber(udp)
	for i, list := range [2][]processed{tcp, udp} {
		for n, p := range list {
			if p.n != n {
				t.Fatalf("router %d: of protocol %d message %d comes where %d should", r.id, i, p.n, n)
			}
		}
		if len(list) != len(r.sent[i]) {
			t.Errorf("router %d: %d of %d messages of protocol %d were processed", r.id, len(list), len(r.sent[i]), i)
		}
	}
	// Datagrams change their member between the sending of the old member's last one and of the new member's first one.
	for n := 1; n < len(udp); n++ {
		before, after := udp[n-1], udp[n]
		if before.member == after.member {
			continue
		}
		for _, p := range tcp {
			// The new member processes no TCP before that, and the old one none after.
			if p.member == before.member && p.at > after.at && p.at < r.untilNext(udp, n) {
				t.Errorf("router %d: TCP message %d was processed by member %s %v after datagram %d by member %s", r.id, p.n, p.member, time.Duration(p.at-after.at), after.n, after.member)
			}
			if p.member == after.member && p.at < r.sent[1][before.n] && p.at > sinceLast(udp, n) {
				t.Errorf("router %d: TCP message %d was processed by member %s %v before datagram %d was sent, which member %s got", r.id, p.n, p.member, time.Duration(r.sent[1][before.n]-p.at), before.n, before.member)
			}
		}
	}
}

// untilNext returns the send time of the last datagram in the run from n on at one member. It may have been processed
// long after.
func (r *router) untilNext(udp []processed, n int) int64 {
	for i := n + 1; i < len(udp); i++ {
		if udp[i].member != udp[n].member {
			return r.sent[1][udp[i-1].n]
		}
	}
	return 1 << 62
}

// sinceLast returns the processing time of the first datagram in the run before n at one member.
func sinceLast(udp []processed, n int) int64 {
	i := n - 1
	for ; i > 0 && udp[i-1].member == udp[n-1].member; i-- {
	}
	return udp[i].at
}

func sortByNumber(p []processed) {
	for i := 1; i < len(p); i++ {
		for j := i; j > 0 && p[j].n < p[j-1].n; j-- {
			p[j], p[j-1] = p[j-1], p[j]
		}
	}
}

// weir apply removes a slot and adds it again, under traffic.
func TestSessionsGoWithResizes(t *testing.T) {
	w := newSteered(t)
	var routers []*router
	for id := range 6 {
		routers = append(routers, newRouter(t, byte(20+id)))
	}
	var stop atomic.Bool
	var running sync.WaitGroup
	for _, r := range routers {
		running.Go(func() { r.run(&stop) })
	}
	w.processing(routers)
	one := strings.Replace(strings.Replace(w.text, "slots: 2", "slots: 1", 1), "      - {slot: 1", "#", 1)
	moved := 0
	for _, text := range []string{one, w.text, one, w.text} {
		w.processedMore(routers, 50)
		c := w.config("%s", text)
		with, after, reset := w.moved(func() ([]steer.Foreseen, error) {
			st, err := state.Read(t.Context(), w.Root)
			if err != nil {
				return nil, err
			}
			spec, _ := steer.Feature{}.Spec(c.Document())
			return steer.ForeseeApply(t.Context(), st, spec)
		}, func() error { w.apply(c); return nil })
		if reset != 0 || with == 0 {
			t.Errorf("%d sessions went along, %d followed, %d were reset", with, after, reset)
		}
		moved += with
	}
	w.processedMore(routers, 50)
	stop.Store(true)
	running.Wait()
	w.processedAll(routers)
	for _, r := range routers {
		if r.err != nil {
			t.Error(r.err)
		}
		r.judge(t, readProcessed(t, w.logs[:]...))
	}
	t.Logf("%d sessions went along", moved)
}

// A member is killed and returns at its slot. Its sessions wait for it, and are not reset as misplaced.
func TestSessionsWaitForTheirSlot(t *testing.T) {
	w := newSteered(t)
	var routers []*router
	for id := range 4 {
		routers = append(routers, newRouter(t, byte(30+id)))
	}
	var stop atomic.Bool
	var running sync.WaitGroup
	// Only TCP: datagrams to an empty slot are rejected, as intended.
	for _, r := range routers {
		running.Go(func() {
			pace := time.NewTicker(time.Millisecond)
			defer pace.Stop()
			for n := uint32(0); !stop.Load(); n++ {
				if _, r.err = r.tcp.Write(message(r.id, n)); r.err != nil {
					return
				}
				r.sent[0] = append(r.sent[0], time.Now().UnixNano())
				<-pace.C
			}
		})
	}
	w.processing(routers)
	w.pause = 300 * time.Millisecond
	for i := range 6 {
		w.processedMore(routers, 20)
		w.members[i%2].Kill()
		w.start(i % 2)
		w.slotIs(i%2, w.members[i%2].PID())
		// weir serve does the work due after its admission; a command may be faster.
		if with, after, reset := w.moved(func() ([]steer.Foreseen, error) { return nil, nil }, func() error { return nil }); with+after+reset != 0 {
			t.Errorf("kill %d: %d, %d sessions moved, %d were reset", i, with, after, reset)
		}
	}
	w.processedMore(routers, 50)
	stop.Store(true)
	running.Wait()
	w.processedAll(routers)
	for _, r := range routers {
		if r.err != nil {
			t.Error(r.err)
		}
		last := -1
		for _, p := range readProcessed(t, w.logs[:]...) {
			if p.router == r.id && p.proto == "gap" {
				t.Errorf("router %d: a gap before message %d at member %s", r.id, p.n, p.member)
			}
			if p.router == r.id && p.proto == "tcp" {
				last = max(last, p.n)
			}
		}
		// A message committed by a process that died before logging it is not a gap.
		if last != len(r.sent[0])-1 {
			t.Errorf("router %d: the last message is %d of %d", r.id, last, len(r.sent[0]))
		}
	}
}

// A session whose router moves to a member without handover is reset.
func TestSessionsOfOthersAreReset(t *testing.T) {
	w := newSteered(t)
	w.members[1].Kill()
	pid, end := daemon(t, routed)
	t.Cleanup(end)
	if err := os.WriteFile(filepath.Join(filepath.Dir(w.logs[1]), "1.pid"), fmt.Append(nil, pid, "\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.slotIs(1, pid)
	place := func(id byte) int {
		p, err := w.service().Where(state.WhatIf{}, netip.AddrFrom4([4]byte{127, 0, 1, id}))
		if err != nil {
			t.Fatal(err)
		}
		return p[0].Slot
	}
	id := byte(50)
	for place(id) != 0 {
		id++
	}
	r := newRouter(t, id)
	if _, err := r.tcp.Write(message(id, 0)); err != nil {
		t.Fatal(err)
	}
	move := record.Moving{Device: fmt.Sprint("127.0.1.", id), To: 1}
	nstest.Until(t, "the member has the session", func() bool {
		f, err := steer.ForeseeMove(t.Context(), w.Root, w.service(), move)
		return err == nil && len(f.Sessions) == 1 && f.Sessions[0].From != nil
	})
	if with, after, reset := w.move(move); with+after != 0 || reset != 1 {
		t.Errorf("%d sessions went along, %d followed, %d were reset", with, after, reset)
	}
	r.tcp.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := r.tcp.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the router hears %v, want a reset", err)
	}
}
