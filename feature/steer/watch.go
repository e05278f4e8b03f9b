// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/ringbuf"
	"github.com/weir-project/weir/service"
)

// lookEvery is the polling interval of the watcher without events (see lookouts). Polling finds pidfiles written late,
// and serves kernels without the hooks. A test changes it.
var lookEvery = time.Second

// commandsApart is the minimum time between two searches caused only by other weir commands: a thousand daemons may
// register one after the other.
const commandsApart = 50 * time.Millisecond

// retries are the times of further searches after an event. The kernel reports a socket before it can be found, and a
// pidfile may be written after its sockets.
var retries = []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond}

var _ feature.Runner = Feature{}

// watcher admits members when they appear.
type watcher struct {
	root *kernel.Root
	own  *feature.OwnLock
	log  feature.Logger
	hook *hooks // nil: the kernel has none
	said feature.Reported[slots.Slot]

	changes   *kernel.Changes // nil: the host has no inotify watch to spare
	polled    time.Time
	state     *state.Reader
	templates *templates.Keeper
	checks    *checks
	lookouts  lookouts
	pace      pace
	marked    map[kernel.Instance]time.Time // engines with a change in progress, and its start
	resets    resets
	hand      reset.Hand
	files     map[string]safefile.Seen
	copying   map[string]map[uint32]uint32 // by namespace: devices with the filter
}

// Run implements feature.Runner. It admits members when their sockets appear, until ctx is done. The program withdraws
// slots by itself.
func (f Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	events := make(chan bpf.WatchEvent, 1024)
	own := &feature.OwnLock{Root: r}
	w := &watcher{root: r, own: own, log: log, hand: f.Hand, marked: map[kernel.Instance]time.Time{}, copying: map[string]map[uint32]uint32{}, state: state.NewReader(r), templates: templates.NewKeeper(own, log), checks: newChecks(events)}
	defer w.state.Close()
	kept := make(chan struct{})
	go func() { w.templates.Run(ctx); close(kept) }()
	defer func() { <-kept }()
	defer w.checks.end(nil)
	if h, err := openHooks(ctx, events); err != nil {
		log.Warn("no kernel hooks, polling for members once a second", "err", err)
	} else {
		w.hook = h
		defer h.Close()
	}
	var commands <-chan struct{}
	if c, err := r.Changes(); err != nil {
		log.Warn("cannot watch for changes by weir commands, polling once a second", "err", err)
	} else {
		w.changes, commands = c, c.C
		defer c.Close()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	try, sockets := 0, (<-chan bpf.WatchEvent)(events)
	for {
		select {
		case <-ctx.Done():
			w.waitResets()
			return nil
		case e := <-sockets:
			w.lookouts.opened(e.Port)
			w.drain(events)
			try = 0
			timer.Reset(retries[0])
			continue
		case <-commands:
			if sockets != nil && try >= len(retries) && !w.own.Echoes() { // otherwise a search is due in a moment
				timer.Reset(commandsApart - min(time.Since(w.polled), commandsApart))
			}
			continue
		case <-timer.C:
		}
		if d := w.pace.wait(time.Now()); d > 0 {
			sockets = nil // a search is due already
			timer.Reset(d)
			continue
		}
		sockets = events
		w.polled = time.Now()
		if w.hook.overflowed() {
			w.lookouts.missedEvents()
		}
		if err := w.poll(ctx); err != nil && ctx.Err() == nil {
			log.Warn("search for members failed", "err", err)
		}
		w.pace.spend(time.Since(w.polled), time.Now())
		try++
		if try < len(retries) {
			timer.Reset(retries[try] - retries[try-1])
		} else {
			w.lookouts.quiet()
			timer.Reset(lookEvery)
		}
	}
}

func (w *watcher) drain(events chan bpf.WatchEvent) {
	for {
		select {
		case e := <-events:
			w.lookouts.opened(e.Port)
		default:
			return
		}
	}
}

// poll searches for the members of all slots without one.
func (w *watcher) poll(ctx context.Context) error {
	if w.changes != nil {
		if err := w.changes.Renew(); err != nil {
			w.log.Warn("cannot watch for changes by weir commands, polling once a second", "err", err)
			w.changes = nil
		}
	}
	if left, err := w.root.Kept(engine.KeptMove); err == nil && left != nil {
		if err := w.finishMove(ctx); err != nil {
			return err
		}
	}
	st, err := w.state.Read(ctx)
	if err != nil {
		return err
	}
	w.finishKilled(ctx)
	w.templates.Kick()
	if err := w.hook.watch(st); err != nil {
		return err
	}
	lacking := map[slots.Slot]bool{}
	for i := range st.Services {
		s := &st.Services[i]
		if s.Problem == state.ProblemSocketHolder {
			if err := w.restartHolder(ctx, s.PinScope, s.Engine); err != nil {
				return err
			}
		}
		if moved, err := w.follow(ctx, s); err != nil || moved {
			w.say(slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: -1}, err, "service moved to its members' network namespace")
			continue
		}
		for _, slot := range s.Slots {
			member := s.Record.Service.Member(slot.Slot)
			if slot.Withdrawn || member == nil {
				continue
			}
			key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot}
			served := slot.Admitted() && !slot.Orphaned(member)
			if served && !engine.Awaited(w.root, s.Record, key) {
				w.succeed(ctx, s, slot, *member)
				continue
			}
			if !served && slot.Drains != 0 && w.fallBack(ctx, s, slot.Slot) {
				continue
			}
			lacking[key] = true
			if w.due(s, key) {
				w.admit(ctx, s, slot.Slot, *member)
			}
		}
		w.followFile(ctx, s)
	}
	w.checks.end(lacking)
	w.lookouts.keep(lacking)
	w.followCopies(ctx, st)
	w.resetDue(ctx)
	return nil
}

// admit first searches without the lock, because most searches find nothing. A member's check runs concurrently and
// does not delay other slots. Its success triggers another search.
func (w *watcher) admit(ctx context.Context, s *state.Service, n int, m service.Member) {
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: n}
	who, err := engine.FindMember(s.Record, ctx, key, m)
	if err != nil {
		w.lookouts.missed(s, key, err, time.Now())
	}
	vet := engine.Vetting{}
	if err == nil && m.Ready != nil {
		var known bool
		if known, err = w.checks.ask(ctx, s.Record, key, m, who); !known {
			return
		}
		vet.Proven = map[slots.Process]bool{who: true}
	}
	if err == nil {
		var l *kernel.WriteLock
		var unlock func()
		if l, unlock, err = w.own.Lock(ctx); err == nil {
			if !engine.StillDue(l, s.Record, key, s.Slots[n]) {
				unlock()
				return
			}
			_, err = engine.AdmitLocked(ctx, l, key, &m, &vet)
			unlock()
			w.templates.Kick()
			w.ownResets(s)
		}
	}
	if err != nil && s.Slots[n].Idle && engine.NotYet(err) {
		w.sayIdle(key, s.Slots[n].PID)
		return
	}
	if err != nil && s.Slots[n].Admitted() {
		w.sayKept(ctx, s, key, err)
		return
	}
	w.say(key, err, "slot admitted")
}

// sayKept logs once that another process keeps a slot, with the reason its member is not admitted.
func (w *watcher) sayKept(ctx context.Context, st *state.Service, s slots.Slot, why error) {
	if !w.said.Changed(s, why.Error()) {
		return
	}
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return
	}
	defer unlock()
	if engine.StillDue(l, st.Record, s, st.Slots[s.Slot]) { // a remark after an operator's admission would take the slot away again
		engine.RemarkKept(w.root, s, why)
		w.log.Warn("slot kept by another process", "service", s.Service, "slot", s.Slot, "err", why)
	}
}

// sayIdle logs once that a slot's process has exited and its sockets wait for the next one. This is the normal state
// with socket activation.
func (w *watcher) sayIdle(s slots.Slot, pid int) {
	if w.said.Changed(s, fmt.Sprintf("idle since process %d", pid)) {
		engine.Remark(w.root, s, nil)
		w.log.Info("process exited, its sockets keep the slot", "service", s.Service, "slot", s.Slot, "pid", pid)
	}
}

// due reports whether a slot's member should be searched now.
func (w *watcher) due(s *state.Service, slot slots.Slot) bool {
	return !w.hook.complete() || w.lookouts.due(s, slot, time.Now())
}

// killedAfter is the time after which an engine with differing maps and pins, and a free lock, counts as left by a
// killed command.
const killedAfter = 2 * time.Second

// finishKilled applies the published changes of a killed command. A running command has the lock.
func (w *watcher) finishKilled(ctx context.Context) {
	for i, e := range w.state.Engines {
		if under, err := engine.IsMarked(e.Maps); err != nil || !under {
			delete(w.marked, i)
			continue
		}
		if w.marked[i].IsZero() {
			w.marked[i] = time.Now()
		}
		if time.Since(w.marked[i]) < killedAfter {
			continue
		}
		soon, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		l, unlock, err := w.own.Lock(soon)
		cancel()
		if err != nil {
			continue
		}
		kind, _ := record.EngineKind(i)
		opened, err := engine.OpenEngine(l, i.Scope, kind) // finishes it
		if err == nil {
			opened.Close()
		}
		unlock()
		if err != nil && !errors.Is(err, kernel.ErrNotExist) {
			w.log.Warn("killed command not completed", "netns", i.Scope, "engine", kind, "err", err)
		}
	}
}

// finishMove completes a change of engine after its command was killed. A running command has the lock.
func (w *watcher) finishMove(ctx context.Context) error {
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return engine.FinishMove(l)
}

// say logs the result for a slot once.
func (w *watcher) say(s slots.Slot, err error, done string) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if !w.said.Changed(s, text) && err != nil {
		return
	}
	engine.Remark(w.root, s, err)
	if err == nil {
		w.log.Info(done, "service", s.Service, "slot", s.Slot)
	} else {
		w.log.Warn("slot stays empty", "service", s.Service, "slot", s.Slot, "err", text)
	}
}

// follow moves a service to its members' namespace if they run in another one. A container gets a new namespace at each
// restart.
func (w *watcher) follow(ctx context.Context, s *state.Service) (moved bool, err error) {
	due := false
	for _, slot := range s.Slots {
		if slot.Admitted() {
			return false, nil
		}
		due = due || w.due(s, slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot})
	}
	if !due {
		return false, nil
	}
	spec := s.Record.Service.Spec
	ns, certain, err := spec.FindNetns(ctx)
	if err != nil || !certain {
		return false, nil //nolint:nilerr // nothing to follow yet: the slots say why they are empty
	}
	defer ns.Close()
	if record.Scope(ns) == s.PinScope {
		return false, nil
	}
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	if now, err := record.Read(l.Root, record.Instance(s.PinScope, s.Name)); err != nil || !reflect.DeepEqual(now, s.Record) {
		return false, nil //nolint:nilerr // a command removed or changed it meanwhile
	}
	t := newTarget(s.Record.Service, ns)
	t.devices, t.from = s.DeviceList, s.Record
	if err := t.publish(ctx, l); err != nil {
		return false, err
	}
	return true, engine.RemoveService(l, s.PinScope, s.Name)
}

func (w *watcher) restartHolder(ctx context.Context, scope string, kind spec.Engine) error {
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	e, err := engine.OpenEngine(l, scope, kind)
	if err != nil {
		return err
	}
	defer e.Close()
	return e.StartSocketHolder()
}

// hooks are the programs of bpf/watch.bpf.c, attached while the watcher runs.
type hooks struct {
	c       *kernel.Collection
	links   []interface{ Close() error }
	reader  *ringbuf.Reader[bpf.WatchEvent]
	watched map[uint16]bool
	udp     bool        // with the hooks of UDP sockets
	lost    atomic.Bool // an event was lost: its port is unknown
}

// complete reports whether the hooks report every new socket.
func (h *hooks) complete() bool { return h != nil && h.udp }

// overflowed reports whether events were lost since the last call.
func (h *hooks) overflowed() bool { return h != nil && h.lost.Swap(false) }

// openHooks attaches the available hooks and sends their events until ctx is done.
func openHooks(ctx context.Context, events chan<- bpf.WatchEvent) (*hooks, error) {
	spec, err := bpf.LoadWatch()
	if err != nil {
		return nil, err
	}
	at := map[string]kernel.Attachment{bpf.WatchProgWatchListen: kernel.RawTracepoint{Name: "inet_sock_set_state"}}
	if cgroup, err := units.CgroupRoot(); err == nil {
		at[bpf.WatchProgWatchBind4] = kernel.Cgroup{Path: cgroup, Hook: ebpf.AttachCGroupInet4PostBind}
		at[bpf.WatchProgWatchBind6] = kernel.Cgroup{Path: cgroup, Hook: ebpf.AttachCGroupInet6PostBind}
	}
	h := &hooks{watched: map[uint16]bool{}, udp: at[bpf.WatchProgWatchBind6] != nil}
	var names []string
	for n := range at {
		names = append(names, n)
	}
	if h.c, err = kernel.Load(spec, names, nil); err != nil {
		return nil, err
	}
	for name, a := range at {
		ln, err := a.Attach(h.c.Programs[name])
		if err != nil {
			h.Close()
			return nil, err
		}
		h.links = append(h.links, ln)
	}
	if h.reader, err = ringbuf.Open[bpf.WatchEvent](h.c.Maps[bpf.WatchMapWatchEvents]); err != nil {
		h.Close()
		return nil, err
	}
	go h.read(ctx, events)
	return h, nil
}

func (h *hooks) read(ctx context.Context, events chan<- bpf.WatchEvent) {
	var pace eventPace
	for e, err := range h.reader.Events(ctx) {
		if err != nil {
			continue
		}
		if rest := pace.next(time.Now()); rest > 0 {
			h.lost.Store(true) // events during the pause may be lost
			select {
			case <-ctx.Done():
			case <-time.After(rest):
			}
		}
		select {
		case events <- e:
		default: // a search for all slots is due already
			h.lost.Store(true)
		}
	}
}

// watch sets the ports of the programs.
func (h *hooks) watch(st state.State) error {
	if h == nil {
		return nil
	}
	want := map[uint16]bool{}
	for _, s := range st.Services {
		for _, ep := range s.Endpoints {
			want[ep.Port] = true
		}
		for _, m := range s.Record.Service.Members {
			for _, b := range m.Bound {
				want[b.Port] = true
			}
		}
	}
	ports := h.c.Maps[bpf.WatchMapWatchPorts]
	for p := range want {
		if !h.watched[p] {
			if err := ports.Put(p, uint8(1)); err != nil {
				return fmt.Errorf("watch port %d: %w", p, err)
			}
			h.watched[p] = true
		}
	}
	for p := range h.watched {
		if !want[p] {
			ports.Delete(p)
			delete(h.watched, p)
		}
	}
	return nil
}

// Close detaches the programs.
func (h *hooks) Close() {
	if h.reader != nil {
		h.reader.Close()
	}
	for _, l := range h.links {
		l.Close()
	}
	if h.c != nil {
		h.c.Close()
	}
}

// newTarget returns a wanted service in a namespace.
func newTarget(s spec.Service, ns *netns.Handle) target {
	t := target{service: s.WithDefaults(), scope: record.Scope(ns), netns: ns.String(), id: ns.ID()}
	if s.Netns != "" {
		t.netns = s.Netns
	}
	return t
}
