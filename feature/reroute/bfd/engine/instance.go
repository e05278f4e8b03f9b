// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// ABI is the layout version of the maps: bfd.h.
const ABI = 1

// Instances of a network namespace.
const (
	instanceName = "@bfd"
	handedName   = "@bfdd" // see OpenHanded
)

// storeFor returns the store of instances with a name. Their spec is the caller's text.
func storeFor(name string) instances.Store[json.RawMessage] {
	return instances.Store[json.RawMessage]{Feature: liveness.Name, ABI: ABI, Object: bpf.Object, Is: func(n string) bool { return n == name }}
}

func instanceKey(scope, name string) kernel.Instance { return storeFor(name).Name(scope, name) }

func (e *Engine) store() instances.Store[json.RawMessage] { return storeFor(e.instance.Name) }

func netnsScope(ns *netns.Handle) string { return kernel.ScopeOf(ns) }

// Links of the instance. The pinned maps hold the complete state of all sessions.
const (
	linkTick    = "tick_"
	linkReceive = "receive_"
	linkLeave   = "leave_"
)

// pins maps the names of pins to maps.
var pins = map[string]string{
	"setups": bpf.BfdMapBfdSetups, "states": bpf.BfdMapBfdStates, "mine": bpf.BfdMapBfdMine, "peers": bpf.BfdMapBfdPeers, "hops": bpf.BfdMapBfdHops, "echoes": bpf.BfdMapBfdEchoes,
	"clock": bpf.BfdMapBfdClock, "events": bpf.BfdMapBfdEvents, links.MapName: bpf.BfdMapRerouteLinks,
}

// PinnedMaps are the names of the pinned maps, by instance. Owners is newer, and not one of them.
var PinnedMaps = map[string][]string{instanceName: slices.Sorted(maps.Keys(pins)), handedName: slices.Sorted(maps.Keys(pins))}

// Needs lists the kernel features for the engine, including liveness' tick source.
func Needs() []kernel.Need {
	first := kernel.TCXLink
	first.Optional, first.For = false, "BFD sessions run by the kernel"
	return append(liveness.Needs(liveness.Config{Tick: time.Millisecond}), first)
}

// Engine runs the sessions of a network namespace. After Close, and after the end of its process, the kernel
// continues with them, except for links held by processes only (OpenHanded).
type Engine struct {
	mu       sync.Mutex // locked before the pins' lock; after it only in an engine private to one goroutine, as by OpenWith
	root     *kernel.Root
	ns       *netns.Handle
	instance kernel.Instance
	tables   tables
	maps     map[string]*ebpf.Map
	stalls   *ebpf.Map
	tick     time.Duration
	unpinned *unpinnedLinks    // unpinned links; nil: links are pinned
	orphans  map[int]time.Time // links of lost sessions: ifindex to time of the loss
	owners   *ebpf.Map         // of OpenHanded
	adopted  bool
}

// Open opens the engine of a network namespace, with existing sessions or none. Ticks are at most tick apart. It
// takes the lock for a moment.
func Open(ctx context.Context, root *kernel.Root, ns *netns.Handle, tick time.Duration) (*Engine, error) {
	l, err := root.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	return OpenWith(ctx, l, ns, tick)
}

// OpenThere is Open for published sessions only. It creates nothing, and returns [kernel.ErrNotExist] if BFD was
// removed, even while it waited for the lock.
func OpenThere(ctx context.Context, root *kernel.Root, ns *netns.Handle, tick time.Duration) (*Engine, error) {
	l, err := root.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	o, err := l.Open(instanceKey(netnsScope(ns), instanceName))
	if err != nil {
		return nil, err
	}
	o.Close()
	return OpenWith(ctx, l, ns, tick)
}

// OpenWith is Open under the caller's lock.
func OpenWith(ctx context.Context, l *kernel.WriteLock, ns *netns.Handle, tick time.Duration) (*Engine, error) {
	e := &Engine{root: l.Root, ns: ns, instance: instanceKey(netnsScope(ns), instanceName), tick: tick}
	return e, e.open(ctx, l, e.publish)
}

func (e *Engine) open(ctx context.Context, l *kernel.WriteLock, maps func(*kernel.WriteLock) (map[string]*ebpf.Map, error)) (err error) {
	if err := kernel.Require(Needs()); err != nil {
		return err
	}
	if e.maps, err = maps(l); err == nil {
		e.tables = newTables(e.maps)
		err = e.reconcile(ctx, l, false)
	}
	if err != nil {
		e.Close()
	}
	return err
}

func newTables(m map[string]*ebpf.Map) tables {
	return tables{setups: m["setups"], states: m["states"], mine: m["mine"], peers: m["peers"], hops: m["hops"], echoes: m["echoes"], clock: m["clock"]}
}

// SetTick sets the longest time between ticks for later calls of [Engine.Recover].
func (e *Engine) SetTick(tick time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tick = tick
}

// Close closes the engine's files. The sessions continue.
func (e *Engine) Close() {
	if e.unpinned != nil {
		e.unpinned.close()
	}
	for _, m := range e.maps {
		m.Close()
	}
	if e.stalls != nil {
		e.stalls.Close()
	}
}

// publish creates the instance if it is missing. The caller closes the returned maps.
func (e *Engine) publish(l *kernel.WriteLock) (out map[string]*ebpf.Map, err error) {
	o, err := l.Open(e.instance)
	if err == nil {
		if err := o.Meta.RequireABI(e.instance, ABI); err != nil {
			o.Close()
			return nil, err
		}
		return o.Maps, nil
	} else if !errors.Is(err, kernel.ErrNotExist) {
		return nil, err
	}
	if out, err = e.newMaps(l); err != nil {
		return out, err
	}
	return out, e.publishWith(l, json.RawMessage("null"), out)
}

func (e *Engine) publishWith(l *kernel.WriteLock, text json.RawMessage, maps map[string]*ebpf.Map) error {
	return e.store().Publish(l, e.instance, instances.Form[json.RawMessage]{Spec: text, Netns: e.ns, Pins: kernel.Pins{Maps: maps}})
}

// newMaps creates the maps by the names of their pins. The map of link states is shared with another instance of the
// namespace if there is one.
func (e *Engine) newMaps(l *kernel.WriteLock) (map[string]*ebpf.Map, error) {
	out := map[string]*ebpf.Map{}
	shared, err := links.Shared(l, e.instance)
	if err != nil {
		return nil, err
	}
	if shared != nil {
		out[links.MapName] = shared
	}
	spec, err := bpf.LoadBfd()
	if err != nil {
		return out, err
	}
	for pin, name := range pins {
		if out[pin] != nil {
			continue
		}
		m, err := ebpf.NewMap(spec.Maps[name])
		if err != nil {
			return out, fmt.Errorf("creating the map %s: %w", name, err)
		}
		out[pin] = m
	}
	return out, nil
}

// Record stores the caller's JSON text with the sessions; All returns it.
func (e *Engine) Record(l *kernel.WriteLock, text []byte) error {
	return e.store().Respec(l, e.instance, text, e.maps)
}

// upgrade replaces the programs of another weir version.
func (e *Engine) upgrade(ctx context.Context, l *kernel.WriteLock) error {
	return e.store().Upgrade(l, e.instance, func() error { return e.reconcile(ctx, l, true) }, e.maps)
}

// reconcile attaches missing programs to the loops and to the devices of sessions. With anew it replaces the attached
// ones too.
func (e *Engine) reconcile(ctx context.Context, l *kernel.WriteLock, anew bool) error {
	loops, err := liveness.OpenLoops(ctx, l, e.ns, e.tick)
	if err != nil {
		return err
	}
	if e.stalls != nil {
		e.stalls.Close()
	}
	e.stalls = loops.Stalls
	// Use the actual tick: another process may have requested a shorter one.
	if err := e.tables.tick(loops.Tick); err != nil {
		return fmt.Errorf("writing BFD's clock: %w", err)
	}
	want := map[string]hook{}
	for name, index := range loops.Devices {
		want[linkTick+strconv.Itoa(index)] = hook{kernel.TCX{Ifindex: index, Device: name, Order: hookorder.Order{Where: hookorder.First}}, bpf.BfdProgBfdTick}
	}
	err = e.each(func(_ uint32, c *bpf.BfdBfdSetup) {
		index := int(c.Ifindex)
		device := kernel.TCX{Ifindex: index, Device: "device " + strconv.Itoa(index)}
		want[linkReceive+strconv.Itoa(index)] = hook{device, bpf.BfdProgBfdReceive}
		device.Egress, device.Order.Where = true, hookorder.First
		want[linkLeave+strconv.Itoa(index)] = hook{device, bpf.BfdProgBfdLeave}
	})
	if err != nil {
		return err
	}
	return e.ns.Do(func() error { return e.attach(l, want, anew) })
}

// each yields all sessions.
func (e *Engine) each(yield func(place uint32, c *bpf.BfdBfdSetup)) error {
	var c bpf.BfdBfdSetup
	for place := range uint32(maxSessions) {
		if err := e.tables.setups.Lookup(place, &c); err != nil {
			return fmt.Errorf("reading sessions: %w", err)
		}
		if c.Generation != 0 {
			yield(place, &c)
		}
	}
	return nil
}

// Put starts sessions, or changes sessions with the same discriminators. Only intervals, multiplier and similar
// properties can change.
func (e *Engine) Put(ctx context.Context, sessions ...Session) error {
	return e.put(func() error { return e.recover(ctx) }, sessions)
}

// PutWith is Put under the caller's lock, for an engine without other users.
func (e *Engine) PutWith(ctx context.Context, l *kernel.WriteLock, sessions ...Session) error {
	return e.put(func() error { return e.reconcile(ctx, l, false) }, sessions)
}

func (e *Engine) put(mend func() error, sessions []Session) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.putLocked(mend, sessions)
}

// putLocked is put for a caller with mu.
func (e *Engine) putLocked(mend func() error, sessions []Session) error {
	places, generation := map[uint32]uint32{}, uint32(0)
	devices, judged := map[uint32]bool{}, map[uint32]int{}
	var taken []uint32
	var unjudged []int
	ports, ofSession := map[uint16]bool{}, map[uint32]uint16{}
	err := e.each(func(place uint32, c *bpf.BfdBfdSetup) {
		places[c.Mine], generation = place, max(generation, c.Generation)
		devices[c.Ifindex], judged[c.Mine] = true, int(c.Link)
		taken = append(taken, place)
		ports[swap(c.SourcePort)], ofSession[c.Mine] = true, swap(c.SourcePort)
	})
	if err != nil {
		return err
	}
	generation = max(generation, uint32(time.Now().Unix())) // different from the sessions of a removed instance too
	missing := false
	for i := range sessions {
		s := &sessions[i]
		if s.SourcePort == 0 {
			s.SourcePort = ofSession[s.Discriminator]
		}
		for s.SourcePort == 0 { // random, so hosts unable to see packets cannot know it
			if port := bfd.FirstSourcePort + uint16(rand.IntN(1<<16-bfd.FirstSourcePort)); !ports[port] {
				s.SourcePort = port
			}
		}
		ports[s.SourcePort] = true
		if err := s.Validate(); err != nil {
			return err
		}
		generation++
		place, there := places[s.Discriminator]
		if !there {
			for slices.Contains(taken, place) {
				place++
			}
			if place >= maxSessions {
				return fmt.Errorf("a network namespace can have %d BFD sessions", maxSessions)
			}
			taken = append(taken, place)
		}
		if !there && !s.LinkDown {
			if s.LinkDown, err = e.inherits(s); err != nil {
				return err
			}
		}
		if err := e.tables.put(place, s, generation); err != nil {
			return fmt.Errorf("the session with %s: %w", s.Peer, err)
		}
		if was := judged[s.Discriminator]; was != 0 && was != s.Link {
			unjudged = append(unjudged, was)
		}
		missing = missing || !devices[uint32(s.Ifindex)]
	}
	if err := e.unlink(unjudged...); err != nil {
		return err
	}
	if missing {
		if err := mend(); err != nil {
			return err
		}
	}
	return e.resolve()
}

// Recover attaches missing programs after loops or devices were recreated.
func (e *Engine) Recover(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.recover(ctx)
}

func (e *Engine) recover(ctx context.Context) error {
	l, err := e.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := e.current(); err != nil {
		return err
	}
	return e.reconcile(ctx, l, false)
}

// errReplaced reports the removal, and perhaps re-creation, of the namespace's BFD. This engine's maps have no
// readers any more.
var errReplaced = errors.New("BFD of this network namespace was removed meanwhile")

// current returns nil while this engine's maps are pinned.
func (e *Engine) current() error {
	o, err := e.root.Open(e.instance, "setups")
	if errors.Is(err, kernel.ErrNotExist) {
		return errReplaced
	} else if err != nil {
		return err
	}
	defer o.Close()
	was, err := e.maps["setups"].Info()
	if err != nil {
		return err
	}
	is, err := o.Maps["setups"].Info()
	if err != nil {
		return err
	}
	a, _ := was.ID()
	if b, _ := is.ID(); a != b {
		return errReplaced
	}
	return nil
}

// Remove removes the BFD of all namespaces. Peers detect a failure unless the sessions were taken down before.
func Remove(l *kernel.WriteLock) error {
	all, err := l.Instances(liveness.Name)
	for _, i := range all {
		if i.Name == instanceName || i.Name == handedName {
			err = errors.Join(err, l.Remove(i))
		}
	}
	return err
}
