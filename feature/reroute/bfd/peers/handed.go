// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/dplane"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// handedOver runs the sessions of bfdd. They belong to this process. With systemd's file descriptor store, the next
// process takes them over; life is the lifetime of this process. Otherwise the connections end with it, and bfdd has
// its sessions down until the next connection.
func handedOver(ctx, life context.Context, r *kernel.Root, p published, config *atomic.Pointer[Config], inherited *inherited, log feature.Logger) (err error) {
	links, connections := inherited.parts()
	k := newKeep(p.scope(), log)
	drop := func() { // files without a use
		k.drop(connections)
		closeLinks(k, links)
		connections, links = nil, nil
	}
	defer func() {
		if life.Err() == nil || k == nil { // else the next process may use them
			drop()
		}
	}()
	if p.Config.FRR == "" {
		drop()
		<-ctx.Done()
		return nil
	}
	network, address, err := Dial(p.Config.FRR)
	if err != nil {
		return err
	}
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	text, err := json.Marshal(p.handed())
	if err != nil {
		return err
	}
	made := engine.Handed{Text: text, Links: links}
	if k != nil {
		made.Keep = linkKeep{k}
	}
	e, err := engine.OpenHanded(ctx, r, ns, config.Load().Tick(), made)
	if err != nil {
		return err
	}
	links = nil // the engine closes them
	defer e.Close()
	h := &handed{ctx: ctx, ns: ns, e: e, config: config, log: log, netns: p.Netns, told: map[uint32]dplane.Change{}, logged: map[uint32]bool{}}
	h.client = dplane.New(network, address, h, k.connections(), log)
	defer func() {
		if life.Err() == nil || k == nil {
			h.client.Abandon()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), again)
			defer cancel()
			err = errors.Join(err, e.Abandon(ctx))
		}
	}()
	h.orphan()
	if e.Adopted() {
		if err := h.adopt(connections, log); err != nil {
			return err
		}
		connections = nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	defer others.Wait()
	defer cancel()
	others.Go(func() {
		e.Run(ctx, func(err error) { log.Warn("BFD sessions lack a neighbour or a device", "netns", p.Netns, "err", err) })
		cancel() // BFD was removed
	})
	others.Go(func() { h.tell(ctx, log) })
	others.Go(func() { keepTick(ctx, e, config) })
	return h.client.Run(ctx)
}

// orphaned is how long a link keeps the verdict of a lost session, for the restart of its daemon.
const orphaned = 10 * time.Second

// orphan marks all links of the configuration: an earlier session may have left one with a verdict.
func (h *handed) orphan() {
	_ = h.ns.Do(func() error { // a missing device has no verdict
		for _, j := range h.config.Load().Evaluated {
			if d, err := net.InterfaceByName(j.Device); err == nil {
				h.e.Orphan(d.Index)
			}
		}
		return nil
	})
}

// adopt takes over the previous process's sessions, and schedules reports of their states to bfdd.
func (h *handed) adopt(connections []*os.File, log feature.Logger) error {
	owners, err := h.e.Owners()
	if err != nil {
		return err
	}
	of := map[uint32]dplane.Owner{}
	for d, o := range owners {
		of[d] = dplane.Owner{Connection: o.Connection, Version: o.Version}
		h.told[d] = dplane.Change{}
	}
	h.client.Adopt(connections, of)
	log.Info("continuing sessions of bfdd", "sessions", len(h.told))
	return nil
}

// handed runs the sessions of a bfdd in the kernel.
//
// Lock order: linking, telling, mu; then the locks of the engine and of package dplane. told.mu is held alone.
type handed struct {
	ctx    context.Context
	ns     *netns.Handle
	e      *engine.Engine
	client *dplane.Client

	config  *atomic.Pointer[Config] // the current configuration
	linking sync.Mutex              // held while the links of sessions are assigned
	linked  *Config                 // configuration of the assigned links

	log   feature.Logger
	netns string // as in the configuration

	telling sync.Mutex      // serializes announcements, so an older one cannot be sent last
	logged  map[uint32]bool // by discriminator: the last logged verdict
	mu      sync.Mutex
	told    map[uint32]dplane.Change // by discriminator: the last values sent to bfdd
}

// Add implements dplane.Engine.
func (h *handed) Add(s dplane.Session, o dplane.Owner) error {
	if s.Multihop {
		return errors.New("multihop session: weir runs single-hop sessions only (RFC 5881): use a bfdd without the data plane for it")
	}
	x := engine.Session{Config: s.Config, Local: s.Local, Peer: s.Peer.WithZone(""), Ifindex: s.Ifindex}
	if s.Echo && !(x.Peer.Is6() && x.Peer.IsLinkLocalUnicast()) { // link-local addresses are not forwarded
		x.Echo = s.EchoTx
	}
	h.linking.Lock()
	defer h.linking.Unlock()
	var device string
	err := h.ns.Do(func() (err error) { device, err = complete(&x, s.Device); return err })
	if err == nil && h.judges(device, x.Peer) {
		x.Link = x.Ifindex
	}
	if err == nil {
		err = h.e.Put(h.ctx, x)
	}
	if err == nil {
		err = h.e.SetOwner(s.Config.Discriminator, engine.Owner{Connection: o.Connection, Version: o.Version, Device: device})
	}
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.told[s.Config.Discriminator] = dplane.Change{} // even if sent before: bfdd may have restarted
	h.mu.Unlock()
	return nil
}

func (h *handed) judges(device string, peer netip.Addr) bool {
	return h.config.Load().judged(device, peer) != ""
}

// link assigns the links of the current configuration to sessions.
func (h *handed) link() error {
	h.linking.Lock()
	defer h.linking.Unlock()
	config := h.config.Load()
	if h.linked == config {
		return nil
	}
	all, err := h.e.Sessions()
	owners, oerr := h.e.Owners()
	if err = errors.Join(err, oerr); err != nil {
		return err
	}
	for d, s := range all {
		link := 0
		if config.judged(owners[d].Device, s.Peer) != "" {
			link = s.Ifindex
		}
		err = errors.Join(err, h.e.SetLink(d, link))
	}
	if err == nil {
		h.linked = config
	}
	return err
}

// move starts the sessions of recreated devices on the new ones. bfdd does not announce them again.
func (h *handed) move() error {
	h.linking.Lock()
	defer h.linking.Unlock()
	all, err := h.e.Sessions()
	owners, oerr := h.e.Owners()
	if err = errors.Join(err, oerr); err != nil {
		return err
	}
	for d, s := range all {
		var now *net.Interface
		local := s.Local
		_ = h.ns.Do(func() (err error) { // a missing device has no sessions
			if now, err = net.InterfaceByName(owners[d].Device); err == nil && !has(now, local) {
				local = localTo(now, s.Peer)
			}
			return err
		})
		if now != nil && now.Index != s.Ifindex && local.IsValid() {
			h.log.Info("device was recreated, its BFD session begins anew", "interface", now.Name, "peer", s.Peer, "frr", true)
			err = errors.Join(err, h.e.Move(h.ctx, d, now.Index, local))
		}
	}
	return err
}

// complete fills in the device and the local address, because bfdd may know only one of them. It returns the device's
// name.
func complete(s *engine.Session, device string) (string, error) {
	if s.Ifindex == 0 {
		all, err := net.Interfaces()
		if err != nil {
			return "", err
		}
		for i := range all {
			if d := &all[i]; d.Name == device || device == "" && (has(d, s.Local) || s.Local.IsUnspecified() && localTo(d, s.Peer).IsValid()) {
				s.Ifindex = d.Index
			}
		}
	}
	d, err := net.InterfaceByIndex(s.Ifindex)
	if err != nil {
		return "", fmt.Errorf("no device for the session with %s", s.Peer)
	}
	if s.Local = s.Local.WithZone(""); s.Local.IsUnspecified() {
		if s.Local = localTo(d, s.Peer); !s.Local.IsValid() {
			return "", fmt.Errorf("%s has no address in the network of %s", d.Name, s.Peer)
		}
	}
	return d.Name, nil
}

// has reports whether an address belongs to a device.
func has(d *net.Interface, address netip.Addr) bool {
	all, _ := d.Addrs() // an error means no address
	return slices.ContainsFunc(all, func(a net.Addr) bool {
		n, err := netip.ParsePrefix(a.String())
		return err == nil && n.Addr() == address
	})
}

// Lost implements dplane.Engine.
func (h *handed) Lost(discriminator uint32) {
	h.mu.Lock()
	delete(h.told, discriminator)
	h.mu.Unlock()
	_ = h.e.Lost(discriminator) // on an error the session ends with the engine
}

// Delete implements dplane.Engine.
func (h *handed) Delete(discriminator uint32) {
	h.mu.Lock()
	delete(h.told, discriminator)
	h.mu.Unlock()
	_ = h.e.Delete(discriminator) // on an error the session ends with the engine
}

// Counters implements dplane.Engine.
func (h *handed) Counters(discriminator uint32) dplane.Counters {
	st, _, _ := h.e.Status(discriminator) // zero for a missing session
	return dplane.Counters{In: st.In, InBytes: st.InBytes, Out: st.Out, OutBytes: st.OutBytes,
		EchoIn: st.Echo.Returned, EchoInBytes: bfd.EchoLength * st.Echo.Returned, EchoOut: st.Echo.Sent, EchoOutBytes: bfd.EchoLength * st.Echo.Sent}
}

// tell sends changes to bfdd at once, and lost notices within a second.
func (h *handed) tell(ctx context.Context, log feature.Logger) {
	var both sync.WaitGroup
	defer both.Wait()
	both.Go(func() {
		if err := h.e.Changes(ctx, func(d uint32) bool { h.announce(d); return true }); err != nil {
			log.Warn("changes of sessions reach bfdd late", "err", err)
		}
	})
	for range (feature.Loop{Every: time.Second, Later: true}).Turns(ctx) {
		if err := h.link(); err != nil && ctx.Err() == nil {
			log.Warn("links are not judged by bfdd's sessions as configured", "err", err)
		}
		if err := h.move(); err != nil && ctx.Err() == nil {
			log.Warn("sessions of bfdd do not follow their recreated devices", "err", err)
		}
		if err := h.e.GiveBack(orphaned); err != nil && ctx.Err() == nil {
			log.Warn("links of ended sessions stay down", "err", err)
		}
		h.mu.Lock()
		var all []uint32
		for d := range h.told {
			all = append(all, d)
		}
		h.mu.Unlock()
		for _, d := range all {
			h.announce(d)
		}
	}
}

// announce sends the state of a session to bfdd if it has changed.
func (h *handed) announce(d uint32) {
	h.telling.Lock()
	defer h.telling.Unlock()
	st, there, err := h.e.Status(d)
	if err != nil || !there {
		return
	}
	h.logChange(d, st)
	now := dplane.Change{Discriminator: d, State: st.State, Remote: st.Remote}
	h.mu.Lock()
	was, mine := h.told[d]
	h.told[d] = now
	if !mine {
		delete(h.told, d)
	}
	h.mu.Unlock()
	if mine && was != now {
		h.client.Tell(now)
	}
}

// logChange logs a new verdict of a session. Sessions never up have none. The caller holds telling.
func (h *handed) logChange(d uint32, st engine.Status) {
	up := st.State == bfd.Up
	if was, logged := h.logged[d]; logged && was == up || !logged && !up && st.Ups == 0 {
		return
	}
	all, err := h.e.Sessions()
	owners, oerr := h.e.Owners()
	maps.DeleteFunc(h.logged, func(d uint32, _ bool) bool { _, there := all[d]; return !there })
	owner, known := owners[d]
	if err != nil || oerr != nil || !known {
		return // a session starts before its owner is recorded; the next check is within a second
	}
	h.logged[d] = up
	args := []any{"interface", owner.Device, "peer", all[d].Peer, "frr", true}
	if path := h.config.Load().judged(owner.Device, all[d].Peer); path != "" {
		args = append([]any{"path", path}, args...)
	}
	if h.netns != "" {
		args = append(args, "netns", h.netns)
	}
	logVerdict(h.log, st, args)
}
