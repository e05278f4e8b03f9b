// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
)

// heard holds the kernel's notifications.
type heard struct {
	links      chan netlink.LinkUpdate
	routes     chan netlink.RouteUpdate
	neighbours chan netlink.NeighUpdate
	failed     chan error // notifications may be lost
}

// subscribe subscribes to changes of links, routes and neighbours.
func (w *watcher) subscribe(done chan struct{}) (h heard, err error) {
	h = heard{make(chan netlink.LinkUpdate, 64), make(chan netlink.RouteUpdate, 1024), make(chan netlink.NeighUpdate, 64), make(chan error, 8)}
	say := func(err error) {
		select {
		case h.failed <- err:
		default:
		}
	}
	err = w.ns.Do(func() error {
		return errors.Join(
			netlink.LinkSubscribeWithOptions(h.links, done, netlink.LinkSubscribeOptions{ErrorCallback: say}),
			netlink.RouteSubscribeWithOptions(h.routes, done, netlink.RouteSubscribeOptions{ErrorCallback: say, ReceiveBufferSize: 4 << 20}),
			netlink.NeighSubscribeWithOptions(h.neighbours, done, netlink.NeighSubscribeOptions{ErrorCallback: say}))
	})
	return h, err
}

// neighbour handles a change of a neighbour. Permanent entries on a used link are kept ones. If another program
// changes or deletes one, repairs and neighbours are reconciled.
func (w *watcher) neighbour(u netlink.NeighUpdate) {
	if w.links[u.LinkIndex] == nil {
		return
	}
	if time.Since(w.reconciled) < quiet { // probably an echo of reconcile's own change
		w.doubt = true
		return
	}
	if u.Type == unix.RTM_DELNEIGH || u.State&netlink.NUD_PERMANENT != 0 {
		w.follow()
	}
}

// link handles a change of an interface.
func (w *watcher) link(l netlink.Link, gone bool) {
	a := l.Attrs()
	x := w.links[a.Index]
	if x == nil {
		if !gone && w.named(a.Name) { // a new interface
			w.followLink()
		}
		return
	}
	if a.Name != x.name { // the index belongs to another link now
		x.name = a.Name
		w.followLink()
	}
	up := !gone && carries(l)
	if !up {
		first := w.words.Set(x.slot, links.CarrierByte, true)
		if first {
			w.log.Warn("link is down", "interface", x.name)
		}
		if first || x.seen { // it may fail again before it is used again
			w.useKept(x, a)
		}
		x.up, x.seen = false, false
		return
	}
	x.seen = true
	if !x.up {
		x.up, x.since = true, time.Now()
		w.followLink() // the kernel drops neighbours of a device that is set down
	}
	if a.MTU != x.mtu {
		x.mtu = a.MTU
		w.followLink()
	}
}

// named reports whether the configuration names an interface.
func (w *watcher) named(device string) bool {
	return slices.ContainsFunc(w.Paths, func(p published) bool {
		return p.Device == device || slices.ContainsFunc(p.Repairs, func(r Repair) bool { return r.Device == device })
	})
}
