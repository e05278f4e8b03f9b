// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/dplane"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
)

// handed has the kernel run the sessions of a bfdd.
type handed struct {
	ctx    context.Context
	ns     *netns.Handle
	e      *engine.Engine
	client *dplane.Client

	telling sync.Mutex // of one change at a time, or an older one could come last
	mu      sync.Mutex
	told    map[uint32]dplane.Change // by discriminator: what bfdd knows of its sessions
}

// Add implements dplane.Engine.
func (h *handed) Add(s dplane.Session) error {
	if s.Multihop {
		return errors.New("a session of several hops: weir runs those of one hop (RFC 5881); set bfdd's up without the data plane")
	}
	x := engine.Session{Config: s.Config, Local: s.Local, Peer: s.Peer.WithZone(""), Ifindex: s.Ifindex}
	x.EchoRx = 0 // nothing here sends echo packets back
	if err := h.ns.Do(func() error { return complete(&x, s.Device) }); err != nil {
		return err
	}
	if err := h.e.Put(h.ctx, x); err != nil {
		return err
	}
	h.mu.Lock()
	h.told[s.Config.Discriminator] = dplane.Change{} // also of one that it has told before: it may have begun anew
	h.mu.Unlock()
	return nil
}

// complete finds the device and the address of this end, of which bfdd may know one alone.
func complete(s *engine.Session, device string) error {
	if s.Ifindex == 0 {
		all, err := net.Interfaces()
		if err != nil {
			return err
		}
		for i := range all {
			if d := &all[i]; d.Name == device || device == "" && (has(d, s.Local) || s.Local.IsUnspecified() && localTo(d, s.Peer).IsValid()) {
				s.Ifindex = d.Index
			}
		}
	}
	d, err := net.InterfaceByIndex(s.Ifindex)
	if err != nil {
		return fmt.Errorf("no device for the session with %s", s.Peer)
	}
	if s.Local = s.Local.WithZone(""); s.Local.IsUnspecified() {
		if s.Local = localTo(d, s.Peer); !s.Local.IsValid() {
			return fmt.Errorf("%s has no address in the network of %s", d.Name, s.Peer)
		}
	}
	return nil
}

// has says whether an address is a device's.
func has(d *net.Interface, address netip.Addr) bool {
	all, _ := d.Addrs() // none: as if it had none
	return slices.ContainsFunc(all, func(a net.Addr) bool {
		n, err := netip.ParsePrefix(a.String())
		return err == nil && n.Addr() == address
	})
}

// Delete implements dplane.Engine.
func (h *handed) Delete(discriminator uint32) {
	h.mu.Lock()
	delete(h.told, discriminator)
	h.mu.Unlock()
	_ = h.e.Delete(discriminator) // a map that cannot be written: the session ends with the engine
}

// Counters implements dplane.Engine.
func (h *handed) Counters(discriminator uint32) dplane.Counters {
	st, _, _ := h.e.Status(discriminator) // zeroes of a session that is not there
	return dplane.Counters{In: st.In, InBytes: st.InBytes, Out: st.Out, OutBytes: st.OutBytes}
}

// tell has bfdd know of changes at once, and of those whose notice was lost within a second.
func (h *handed) tell(ctx context.Context, log feature.Logger) {
	var both sync.WaitGroup
	defer both.Wait()
	both.Go(func() {
		if err := h.e.Changes(ctx, func(d uint32) bool { h.tellOf(d); return true }); err != nil {
			log.Warn("bfdd hears of changes late", "reason", err)
		}
	})
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		h.mu.Lock()
		var all []uint32
		for d := range h.told {
			all = append(all, d)
		}
		h.mu.Unlock()
		for _, d := range all {
			h.tellOf(d)
		}
	}
}

// tellOf has bfdd know what a session is, if it does not.
func (h *handed) tellOf(d uint32) {
	h.telling.Lock()
	defer h.telling.Unlock()
	st, there, err := h.e.Status(d)
	if err != nil || !there {
		return
	}
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
