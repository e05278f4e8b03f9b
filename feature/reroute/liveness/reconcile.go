// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/probe"
)

// Name prefixes of links. The device index follows.
const (
	linkTick   = "tick_"
	linkReturn = "return_"
	linkLeave  = "leave_"
)

// filterName names the filters on kernels without tcx, and the programs of segments.
const filterName = "weir_liveness"

// errNoDevice reports a missing device. The session waits for it.
var errNoDevice = errors.New("no such device")

// scopeInstance is a namespace's liveness, open for writing. Its methods run in the namespace.
type scopeInstance struct {
	lock  *kernel.WriteLock
	scope string
	p     published
	ns    *netns.Handle
	pins  *kernel.Opened
	loops []loop
	seed  bool               // reseed all loops: their clock has changed
	coll  *kernel.Collection // loaded for the first attached program
}

// reconcileScope applies the published state to the kernel. Every change takes effect through it, and it recovers
// killed commands.
func reconcileScope(l *kernel.WriteLock, scope string) error {
	s, err := openInstance(l, scope)
	if err != nil {
		return err
	}
	defer s.close()
	return s.ns.Do(func() error { return s.reconcile(false) })
}

func openInstance(l *kernel.WriteLock, scope string) (_ *scopeInstance, err error) {
	s := &scopeInstance{lock: l, scope: scope}
	if s.p, err = readPublished(l.Root, scope); err != nil {
		return nil, err
	}
	if s.ns, err = netns.Find(s.p.Netns, s.p.ID); err != nil {
		return nil, err
	}
	if s.pins, err = l.Open(instance(scope)); err != nil {
		s.ns.Close()
		return nil, err
	}
	// Damaged pins lack maps: upgrade and publish pin the new ones.
	if _, err := makeMaps(s.pins.Maps); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *scopeInstance) close() {
	if s.coll != nil {
		s.coll.Close()
	}
	s.pins.Close()
	s.ns.Close()
}

// reconcile applies the published state. With anew it replaces the attached programs.
func (s *scopeInstance) reconcile(anew bool) error {
	cpus, err := loopCPUs(s.p.Config.CPUs)
	if err != nil {
		return err
	}
	tick := s.p.Config.tick()
	if s.loops, err = makeLoops(cpus, tick); err != nil {
		return err
	}
	kernel.Step("liveness:loops")
	places, err := s.locate()
	if err != nil {
		return err
	}
	if err := s.followMoves(); err != nil {
		return err
	}
	// Receivers come first: segments and returns are ready before any probe is sent.
	if err := s.putSessions(places); err != nil {
		return err
	}
	kernel.Step("liveness:sessions")
	if err := s.attach(places, anew); err != nil {
		return err
	}
	kernel.Step("liveness:attached")
	if err := s.segments(places, anew); err != nil {
		return err
	}
	kernel.Step("liveness:segments")
	if err := s.clockwork(uint64(tick)); err != nil {
		return err
	}
	return retune(s.pins.Maps[pinClockwork], s.pins.Maps[pinBeats], s.loops, s.seed)
}

// locate finds the sessions' devices. Sessions without one wait.
func (s *scopeInstance) locate() (map[string]location, error) {
	out, speak := map[string]location{}, map[string]int{}
	for _, session := range s.p.Config.Sessions {
		p, err := findDevice(session.Device)
		if errors.Is(err, errNoDevice) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("session %q: device %s: %w", session.Name, session.Device, err)
		}
		p.index = s.p.Indexes[session.Name]
		out[session.Name] = p
		if !session.Observe {
			speak[session.Device] = p.device
		}
	}
	return out, slots(speak)
}

// findDevice returns the location of a device able to send frames.
func findDevice(name string) (p location, err error) {
	l, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return p, errNoDevice
	} else if err != nil {
		return p, err
	}
	a := l.Attrs()
	if a.EncapType != "ether" || a.Flags&unix.IFF_LOOPBACK != 0 {
		return p, fmt.Errorf("type %s: probes need an Ethernet device (or a VLAN or bond)", a.EncapType)
	}
	p.device, p.master = a.Index, a.MasterIndex
	if p.master == 0 {
		return p, nil
	}
	m, err := netlink.LinkByIndex(p.master)
	if err != nil {
		return p, err
	}
	if v, ok := m.(*netlink.Vrf); ok {
		p.table = int(v.Table)
	}
	return p, nil
}

// segmentFunction probes for answers to probes. Sessions with mode echo need none. Tests override it.
var segmentFunction = probe.SegmentFunction.Check

// program returns a program over the instance's maps.
func (s *scopeInstance) program(name string) (*ebpf.Program, error) {
	if s.coll == nil {
		spec, err := bpf.LoadLiveness()
		if err != nil {
			return nil, err
		}
		share := map[string]*ebpf.Map{}
		for pin, name := range sharedMaps {
			share[name] = s.pins.Maps[pin]
		}
		names := []string{bpf.LivenessProgLivenessTick, bpf.LivenessProgLivenessReturn, bpf.LivenessProgLivenessLeave}
		if segmentFunction() == nil {
			names = append(names, bpf.LivenessProgLivenessEnd)
		}
		if s.coll, err = kernel.Load(spec, names, share); err != nil {
			return nil, err
		}
	}
	if s.coll.Programs[name] == nil {
		return nil, segmentFunction() // only this program is optional
	}
	return s.coll.Programs[name], nil
}

// putSessions writes the sessions with a device to the maps, and clears all others.
func (s *scopeInstance) putSessions(places map[string]location) error {
	used := map[uint32]bool{}
	for _, p := range places {
		used[p.index] = true
	}
	for _, session := range s.p.Config.Sessions {
		if _, there := places[session.Name]; !there {
			var c bpf.LivenessLivenessSetup
			i := s.p.Indexes[session.Name]
			if err := s.pins.Maps[pinSetups].Lookup(i, &c); err != nil {
				return fmt.Errorf("reading session %d: %w", i, err)
			}
			used[i] = c.On != 0 && !deviceExists(c.Ifindex) // a missing device may be recreated; until then the session keeps its verdict
		}
	}
	for i := range uint32(maxSessions) {
		if used[i] {
			continue
		}
		if err := clearSession(s.pins.Maps, i); err != nil {
			return err
		}
	}
	for _, session := range s.p.Config.Sessions {
		p, there := places[session.Name]
		if !there {
			continue
		}
		session = session.filled()
		key, err := readKey(session.KeyFile)
		if err == nil {
			err = putSession(s.pins.Maps, session, p, key)
		}
		if err != nil {
			return fmt.Errorf("session %q: %w", session.Name, err)
		}
	}
	return nil
}

// segments installs the functions for the peers' probes and removes unneeded ones.
func (s *scopeInstance) segments(places map[string]location, anew bool) error {
	want := map[segment]bool{}
	for _, session := range s.p.Config.Sessions {
		if p, there := places[session.Name]; there && session.filled().judges() {
			want[segment{SID: session.Function.String(), Table: p.table}] = true
		}
	}
	for g := range want {
		r := s.route(g)
		if there, err := r.Attached(); err == nil && there && !anew {
			continue
		}
		prog, err := s.program(bpf.LivenessProgLivenessEnd)
		if err != nil {
			return err
		}
		if err := r.Attach(prog, filterName); err != nil {
			return err
		}
	}
	return s.dropSegments(want)
}

// route returns the route of a segment. It uses a device of ours, because a link's device would take the route with
// it.
func (s *scopeInstance) route(g segment) hook.Segment {
	r := hook.Segment{Table: g.Table}
	if len(s.loops) > 0 {
		r.Ifindex = s.loops[0].entry
	}
	r.SID, _ = netip.ParseAddr(g.SID) // written by String
	return r
}

// dropSegments removes all our routes except the given ones.
func (s *scopeInstance) dropSegments(but map[segment]bool) error {
	all, err := hook.Segments()
	if err != nil {
		return err
	}
	for _, g := range all {
		if !but[segment{SID: g.SID.String(), Table: g.Table}] {
			if err := g.Detach(); err != nil {
				return err
			}
		}
	}
	return nil
}

// clockwork writes tick and loops for the programs.
func (s *scopeInstance) clockwork(tick uint64) error {
	var m bpf.LivenessLivenessTickSource
	if err := s.pins.Maps[pinClockwork].Lookup(uint32(0), &m); err != nil {
		return fmt.Errorf("reading the tick source: %w", err)
	}
	was := m
	m.Tick, m.Loops, m.Sessions = tick, uint32(len(s.loops)), 0
	for _, i := range s.p.Indexes {
		m.Sessions = max(m.Sessions, i+1)
	}
	m.Ifindex = [maxLoops]uint32{}
	for i, l := range s.loops {
		m.Ifindex[i] = uint32(l.entry)
	}
	if m == was {
		return nil
	}
	s.seed = m.Tick != was.Tick || m.Ifindex != was.Ifindex
	if err := s.pins.Maps[pinClockwork].Put(uint32(0), m); err != nil {
		return fmt.Errorf("writing the tick source: %w", err)
	}
	return nil
}
