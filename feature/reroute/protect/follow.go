// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/protect/neigh"
)

// keptNow collects the neighbours with permanent entries of weir's. It keeps the existing state of known ones.
func (w *watcher) keptNow(routes []route) error {
	want, err := neighbours(routes)
	if err != nil {
		return err
	}
	was := w.kept
	w.kept, w.unresolved = map[neigh.Key]*keptNeighbour{}, map[neigh.Key]bool{}
	for k := range want {
		n, err := neigh.Find(k)
		if err != nil {
			return err
		}
		if isUnresolved(n) || isStandIn(n) {
			w.unresolved[k] = true
		}
		if o := was[k]; o != nil && o.stands() && isStandIn(n) {
			w.kept[k] = o
			continue
		}
		var v neigh.Value
		if err := w.pins.Maps[pinNeighbours].Lookup(k, &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // the operator's, or not answered yet
		} else if err != nil {
			return err
		}
		if n == nil || n.State&netlink.NUD_PERMANENT == 0 || len(n.HardwareAddr) != 6 {
			continue
		}
		w.kept[k] = &keptNeighbour{mac: n.HardwareAddr, heard: time.Now()}
		if o := was[k]; o != nil && bytes.Equal(o.mac, n.HardwareAddr) {
			w.kept[k] = o
		}
	}
	return nil
}

// hears handles an address announced by a neighbour.
func (w *watcher) hears(e *neigh.Ears, t neigh.Told) {
	n := w.kept[t.Key]
	switch {
	case n == nil:
	case n.stands():
		if t.MAC != nil {
			w.believe(t.Key, n, t)
		}
	case t.MAC == nil && n.times >= askOnly: // the whole link was asked, and the answer names no address
	case t.MAC == nil || bytes.Equal(t.MAC, n.mac):
		n.heard, n.times, n.other = time.Now(), 0, nil
	case n.times >= askOnly: // the old address does not answer
		w.believe(t.Key, n, t)
	case !bytes.Equal(n.other, t.MAC):
		n.other, n.since = t.MAC, time.Now()
		w.asks(e, t.Key, n, false)
	}
}

// believe writes the new address to the kernel's entry; repairs follow by [watcher.neighbour].
func (w *watcher) believe(k neigh.Key, n *keptNeighbour, t neigh.Told) {
	var v neigh.Value
	copy(v.MAC[:], t.MAC)
	stood := n.stands()
	if err := w.ns.Do(func() error {
		if stood {
			if err := w.pins.Maps[pinNeighbours].Put(k, v); err != nil {
				return fmt.Errorf("recording the neighbour %s: %w", k.Addr(), err)
			}
		}
		return neigh.Set(k, v, netlink.NUD_PERMANENT)
	}); err != nil {
		w.log.Warn("neighbour's new link address not applied", "neighbour", k.Addr(), "err", err)
		return
	}
	name := ""
	if l := w.links[int(k.Ifindex)]; l != nil {
		name = l.name
	}
	if stood {
		w.log.Info("neighbour has answered", "neighbour", k.Addr(), "interface", name, "address", t.MAC)
	} else {
		w.log.Info("neighbour has a new link address", "neighbour", k.Addr(), "interface", name, "old", n.mac, "new", t.MAC)
	}
	n.mac, n.heard, n.times, n.other = t.MAC, time.Now(), 0, nil
	w.follow()
}

func (w *watcher) asks(e *neigh.Ears, k neigh.Key, n *keptNeighbour, everybody bool) {
	n.asked = time.Now()
	_ = w.ns.Do(func() error { return e.Ask(k, n.mac, everybody) }) // fails on a link without a carrier; inquire repeats it
}

// inquire asks neighbours silent for a long time, and neighbours on links that are down.
func (w *watcher) inquire(e *neigh.Ears) {
	now := time.Now()
	for k, n := range w.kept {
		if n.other != nil && now.Sub(n.since) >= verify {
			w.believe(k, n, neigh.Told{Key: k, MAC: n.other})
			continue
		}
		l := w.links[int(k.Ifindex)]
		if l == nil || !l.up {
			continue
		}
		after, every := askAfter, askEvery
		if w.words.Get(l.slot).Reasons() != 0 {
			after = askEvery
		}
		if n.times > 5*askOnly && !n.stands() {
			every = askSeldom
		}
		if now.Sub(n.heard) < after || now.Sub(n.asked) < every {
			continue
		}
		everybody := n.times >= askOnly
		n.times++
		w.asks(e, k, n, everybody)
	}
}
