// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/ringbuf"
)

// Needs are the kernel features of a quarantine. Without tcx its programs are filters of the devices' clsact qdiscs,
// without links.
var Needs = []kernel.Need{kernel.TCXLink, kernel.ClsactFilter}

// hasTCX is a variable because a test simulates a kernel without tcx.
var hasTCX = func() bool { return kernel.TCXLink.Check() == nil }

// quarantineABI is the version of the quarantine's maps.
const quarantineABI = 1

// Names of the pins.
const (
	pinSessions = "sessions"
	pinCounts   = "counts"
	linkIn      = "in" // followed by the interface's number
	linkOut     = "out"
	linkAgain   = "again" // at the buffer device
)

// Quarantine is attached to a backend's devices. It is pinned, so blocks persist while the agent is dead.
type Quarantine struct {
	sessions, counts *ebpf.Map
	pairs            *ebpf.Map // address pairs of sessions; not pinned, rebuilt from the sessions
	strays           *ringbuf.Reader[bpf.QuarantineQuarantineKey]
	buffer           *packetbuf.Device[repair.Flow] // buffers packets; nil: not available

	filters  []kernel.Clsact // in place of links
	programs []*ebpf.Program // of the filters: kept to attach a removed filter again
	device   int             // interface index of one of the devices
	devices  map[string]int  // interface indexes by name
	// Lock order: the lock of the pins, closing, the packet buffer's lock, changing.
	changing sync.Mutex    // guards changes of entries
	gone     []repair.Flow // departed sessions, oldest first; guarded by changing

	closing sync.RWMutex // delayed changes may run after Close
	closed  bool
}

// Store has the instances. Their spec is the list of devices.
var Store = instances.Store[[]string]{Feature: "handoff", ABI: quarantineABI, Object: bpf.Object, Is: func(name string) bool { return name == quarantineName }}

// Instance returns the quarantine's instance of a network namespace.
func Instance(ns *netns.Handle) kernel.Instance {
	return Store.Name(kernel.ScopeOf(ns), quarantineName)
}

const quarantineName = "quarantine"

// PinnedMaps returns the names of the maps of the quarantine. ok is false for another instance.
func PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	return []string{pinSessions, pinCounts}, i.Feature == Store.Feature && i.Scope != kernel.HostScope && i.Name == quarantineName
}

// Open creates the quarantine of a network namespace at these devices. Sessions of an existing quarantine stay.
func Open(ctx context.Context, root *kernel.Root, ns *netns.Handle, devices []string, log *slog.Logger) (_ *Quarantine, err error) {
	if err := kernel.Require(Needs); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadQuarantine()
	if err != nil {
		return nil, err
	}
	l, err := root.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	share := map[string]*ebpf.Map{}
	before, err := l.Open(Instance(ns))
	if err == nil {
		defer before.Close()
		err = shareMaps(before, share)
	} else if errors.Is(err, kernel.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	g := &Quarantine{devices: map[string]int{}}
	defer func() {
		if err != nil {
			g.Close()
		}
	}()
	if err := g.openBuffer(ns, spec, log); err != nil {
		return nil, err
	}
	c, err := kernel.Load(spec, []string{"quarantine_in", "quarantine_out", "quarantine_again"}, share)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := g.openMaps(c); err != nil {
		return nil, err
	}
	if err := g.publish(l, ns, c, devices); err != nil {
		return nil, err
	}
	if err := g.takeOver(); err != nil {
		return nil, err
	}
	return g, nil
}

// shareMaps adds the maps of an existing quarantine, for reuse by a new one.
func shareMaps(before *kernel.Opened, share map[string]*ebpf.Map) error {
	if err := before.Meta.RequireABI(before.Instance, quarantineABI); err != nil {
		return err
	}
	share["quarantine_sessions"], share["quarantine_counts"] = before.Maps[pinSessions], before.Maps[pinCounts]
	return nil
}

// openBuffer creates the buffer device, and sets its index in the programs.
func (g *Quarantine) openBuffer(ns *netns.Handle, spec *ebpf.CollectionSpec, log *slog.Logger) (err error) {
	if g.buffer, err = makeBuffer(ns); err != nil {
		log.Warn("packet buffering unavailable, departures wait for the load balancer", "err", err)
		return nil
	}
	return spec.Variables[bpf.QuarantineVarQuarantineBuffer].Set(uint32(g.buffer.Ifindex))
}

// openMaps opens the maps of the programs, and adds the address pairs of existing sessions.
func (g *Quarantine) openMaps(c *kernel.Collection) (err error) {
	for name, m := range map[string]**ebpf.Map{"quarantine_sessions": &g.sessions, "quarantine_counts": &g.counts, "quarantine_pairs": &g.pairs} {
		if *m, err = c.Maps[name].Clone(); err != nil {
			return err
		}
	}
	if g.strays, err = ringbuf.Open[bpf.QuarantineQuarantineKey](c.Maps["quarantine_strays"]); err != nil {
		return err
	}
	all, err := g.Entries()
	for _, e := range all {
		err = errors.Join(err, g.putPair(quarantineKey(e.Flow)))
	}
	return err
}

// putPair adds the address pair of a session, before the session itself.
func (g *Quarantine) putPair(k *bpf.QuarantineQuarantineKey) error {
	if err := g.pairs.Put(&bpf.QuarantineQuarantinePair{Client: k.Client, Service: k.Service}, uint8(1)); err != nil {
		return fmt.Errorf("quarantine of %s: %w", flowOfKey(*k), err)
	}
	return nil
}

// publish attaches the programs, and pins the quarantine.
func (g *Quarantine) publish(l *kernel.WriteLock, ns *netns.Handle, c *kernel.Collection, devices []string) error {
	links, err := g.attach(ns, c, devices)
	defer func() {
		for _, l := range links {
			l.Close()
		}
	}()
	if err != nil {
		return err
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{pinSessions: c.Maps["quarantine_sessions"], pinCounts: c.Maps["quarantine_counts"]}, Links: links}
	// Until its predecessor is removed both are attached, with the same sessions: no packet slips through in between.
	if err := Store.Publish(l, Instance(ns), instances.Form[[]string]{Spec: devices, Netns: ns, Pins: pins}); err != nil {
		return err
	}
	_ = ns.Do(func() error { l.NoteFilters(Instance(ns), g.filters); return nil })
	kernel.Step("handoff:quarantine")
	return nil
}

// attach attaches the programs at each device. It returns the created links even on failure.
func (g *Quarantine) attach(ns *netns.Handle, c *kernel.Collection, devices []string) (map[string]kernel.Link, error) {
	links := map[string]kernel.Link{}
	if len(devices) == 0 {
		return links, errors.New("no devices: name the interfaces of clients' packets, in both directions")
	}
	return links, ns.Do(func() error {
		for _, name := range devices {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return fmt.Errorf("device %s: %w", name, err)
			}
			if g.device == 0 {
				g.device = i.Index
			}
			g.devices[name] = i.Index
			for _, egress := range []bool{false, true} {
				prog, side := c.Programs["quarantine_in"], linkIn
				if egress {
					prog, side = c.Programs["quarantine_out"], linkOut
				}
				if !hasTCX() {
					if err := g.filter(i.Index, egress, prog); err != nil {
						return err
					}
					continue
				}
				ln, err := kernel.TCX{Ifindex: i.Index, Device: name, Egress: egress}.Attach(prog)
				if err != nil {
					return err
				}
				links[side+strconv.Itoa(i.Index)] = ln
			}
		}
		if g.buffer == nil {
			return nil
		}
		if !hasTCX() {
			return g.filter(g.buffer.Ifindex, false, c.Programs["quarantine_again"])
		}
		ln, err := kernel.TCX{Ifindex: g.buffer.Ifindex, Device: bufferName}.Attach(c.Programs["quarantine_again"])
		if err != nil {
			return err
		}
		links[linkAgain] = ln
		return nil
	})
}

// filter attaches a program on a kernel without tcx.
func (g *Quarantine) filter(ifindex int, egress bool, prog *ebpf.Program) error {
	at := filterAt(ifindex, egress)
	g.filters = append(g.filters, at)
	held, err := prog.Clone()
	if err != nil {
		return err
	}
	g.programs = append(g.programs, held)
	return at.Attach(prog)
}

// filterAt returns the location of a program on kernels without tcx (before 6.6): a filter of the device.
func filterAt(ifindex int, egress bool) kernel.Clsact {
	name := "weir_quarantine_in"
	if egress {
		name = "weir_quarantine_out"
	}
	return kernel.Clsact{Ifindex: ifindex, Name: name, Egress: egress, Priority: 3} // weir's other filters precede it
}

// Close closes the process's descriptors. The quarantine stays attached.
func (g *Quarantine) Close() {
	g.closing.Lock()
	defer g.closing.Unlock()
	g.closed = true
	if g.buffer != nil {
		g.buffer.Close()
	}
	if g.strays != nil {
		g.strays.Close()
	}
	for _, m := range []*ebpf.Map{g.sessions, g.counts, g.pairs} {
		if m != nil {
			m.Close()
		}
	}
	for _, p := range g.programs {
		p.Close()
	}
}

// Shut blocks a session's socket in both directions.
func (g *Quarantine) Shut(f repair.Flow, e move.Epoch) error { return g.put(f, Shut, e) }

// Quiet blocks RST and FIN of a session until its socket has sent a packet.
func (g *Quarantine) Quiet(f repair.Flow, e move.Epoch) error { return g.put(f, Quiet, e) }

func (g *Quarantine) put(f repair.Flow, what State, e move.Epoch) error {
	g.changing.Lock()
	defer g.changing.Unlock()
	v := bpf.QuarantineQuarantineEntry{Since: kernel.Monotonic(), What: uint32(what), Epoch: uint32(e), Ifindex: uint32(g.device)}
	if err := g.putPair(quarantineKey(f)); err != nil {
		return err
	}
	if err := g.sessions.Put(quarantineKey(f), &v); err != nil {
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	return nil
}

// Lift removes a session's entry, unless it belongs to another move by now. After Close this is left to the next
// agent.
func (g *Quarantine) Lift(f repair.Flow, e move.Epoch) error {
	g.closing.RLock()
	defer g.closing.RUnlock()
	if g.closed {
		return nil
	}
	if now, ok, err := g.Lookup(f); err != nil || !ok || now.Epoch != e {
		return err
	}
	if err := g.sessions.Delete(quarantineKey(f)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	return nil
}

// Counts are numbers of packets affected by a quarantine since its creation.
type Counts struct {
	Returned uint64 `json:"returned"` // sent back to the load balancer, which buffers them
	Deaf     uint64 `json:"deaf"`     // of clients, dropped: too late to be sent back
	Mute     uint64 `json:"mute"`     // to clients, dropped: RST and FIN without a socket
	Spoke    uint64 `json:"spoke"`    // arrived sessions with a first sent packet
	Buffered uint64 `json:"buffered"` // buffered here before they were sent back
	Strays   uint64 `json:"strays"`   // of departed sessions, dropped
}

// Counts reads the counters.
func (g *Quarantine) Counts() (c Counts, err error) {
	for i, n := range []*uint64{&c.Returned, &c.Deaf, &c.Mute, &c.Spoke, &c.Buffered, &c.Strays} {
		var each []uint64
		if err := g.counts.Lookup(uint32(i), &each); err != nil {
			return c, fmt.Errorf("read the quarantine's counts: %w", err)
		}
		for _, v := range each {
			*n += v
		}
	}
	return c, nil
}
