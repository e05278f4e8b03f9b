// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/dump"
	"golang.org/x/sys/unix"
)

// validNeighbour are the states in which the kernel sends to a neighbour's address (NUD_VALID,
// include/net/neighbour.h).
const validNeighbour = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE | netlink.NUD_PROBE | netlink.NUD_STALE | netlink.NUD_DELAY

// resolve resolves the neighbours of sessions without one, because programs cannot trigger resolution. On devices
// without forwarding, bpf_fib_lookup fails, so this also tells the programs the link addresses and their changes.
// Elsewhere the programs follow the kernel.
func (e *Engine) resolve() error {
	var errs []error
	seen := map[[2]int][]netlink.Neigh{}
	err := e.each(func(place uint32, c *bpf.BfdBfdSetup) {
		if err := e.resolveOne(place, c, seen); err != nil {
			errs = append(errs, err)
		}
	})
	return errors.Join(append(errs, err)...)
}

// Offsets in struct bfd_hop: the addresses, the neighbour's first, and whether they are known.
const (
	hopAddresses = 8
	hopKnown     = 20
)

// resolveOne resolves the neighbour of one session. seen caches the listed neighbours by device and family.
func (e *Engine) resolveOne(place uint32, c *bpf.BfdBfdSetup, seen map[[2]int][]netlink.Neigh) error {
	hop := make([]byte, e.tables.hops.ValueSize())
	if err := e.tables.hops.Lookup(place, &hop); err != nil {
		return fmt.Errorf("reading a neighbour: %w", err)
	}
	n := &netlink.Neigh{LinkIndex: int(c.Ifindex), Family: unix.AF_INET, Flags: netlink.NTF_USE}
	size := 1
	if c.Ipv6 != 0 {
		n.Family, size = unix.AF_INET6, 4
	}
	for _, w := range c.Peer[:size] {
		n.IP = binary.NativeEndian.AppendUint32(n.IP, w)
	}
	var device netlink.Link
	at := [2]int{n.LinkIndex, n.Family}
	all, listed := seen[at]
	err := e.ns.Do(func() (err error) {
		if device, err = netlink.LinkByIndex(n.LinkIndex); err == nil && !listed {
			all, err = dump.NeighList(n.LinkIndex, n.Family)
		}
		return err
	})
	seen[at] = all
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil // the session waits for its device
	} else if err != nil {
		return fmt.Errorf("resolving the neighbour %s: %w", n.IP, err)
	}
	i := slices.IndexFunc(all, func(o netlink.Neigh) bool {
		return o.IP.Equal(n.IP) && o.State&validNeighbour != 0 && len(o.HardwareAddr) == 6
	})
	known := binary.NativeEndian.Uint32(hop[hopKnown:]) != 0
	switch {
	case i < 0 && known:
		return nil // a known address stays until there is a new one
	case i < 0:
		return e.lookUp(n)
	}
	if all[i].State&netlink.NUD_STALE != 0 {
		// Only programs send to it, so the kernel must check whether it is reachable.
		if err := e.lookUp(n); err != nil {
			return err
		}
	}
	addresses := slices.Concat(all[i].HardwareAddr, device.Attrs().HardwareAddr)
	if known && bytes.Equal(hop[hopAddresses:hopAddresses+len(addresses)], addresses) {
		return nil
	}
	copy(hop[hopAddresses:], addresses)
	binary.NativeEndian.PutUint32(hop[hopKnown:], 1)
	return e.tables.hops.Put(place, hop)
}

// lookUp makes the kernel resolve a neighbour.
func (e *Engine) lookUp(n *netlink.Neigh) error {
	return lookupError(n, e.ns.Do(func() error { return netlink.NeighSet(n) }))
}

// lookupError explains why the kernel does not resolve a neighbour; nil: it does.
func lookupError(n *netlink.Neigh, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOBUFS): // neigh_alloc (net/core/neighbour.c)
		family := "ipv4"
		if n.Family == unix.AF_INET6 {
			family = "ipv6"
		}
		return fmt.Errorf("resolving the neighbour %s: the kernel has no room for more neighbours (%w): raise net.%s.neigh.default.gc_thresh3 of the host", n.IP, err, family)
	}
	return fmt.Errorf("resolving the neighbour %s: %w", n.IP, err)
}

// warnAgain is the time between equal warnings.
const warnAgain = time.Minute

// repeated suppresses repeated warnings.
type repeated struct {
	text string
	at   time.Time
}

// news reports whether an error, or nil, needs a warning.
func (r *repeated) news(err error, now time.Time) bool {
	if err == nil {
		*r = repeated{}
		return false
	}
	if err.Error() == r.text && now.Sub(r.at) < warnAgain {
		return false
	}
	*r = repeated{err.Error(), now}
	return true
}

// Run does the work programs cannot do until ctx is done: it resolves neighbours, and restores attachments to
// recreated devices and loops. It also returns if the engine was replaced: see [errReplaced].
func (e *Engine) Run(ctx context.Context, warn func(error)) {
	var last repeated
	for turn := range (feature.Loop{Every: time.Second, Later: true}).Turns(ctx) {
		err := e.current()
		if err == nil {
			e.mu.Lock()
			err = e.resolve()
			e.mu.Unlock()
		}
		if turn.N%10 == 9 {
			err = errors.Join(err, e.Recover(ctx))
		}
		if errors.Is(err, errReplaced) {
			return
		}
		if last.news(err, time.Now()) && ctx.Err() == nil {
			warn(err)
		}
	}
}
