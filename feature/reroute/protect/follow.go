// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"errors"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// keptNow are the neighbours whose permanent entries are weir's. What is known of them stays.
func (w *watcher) keptNow(routes []route) error {
	want, err := neighbours(routes)
	if err != nil {
		return err
	}
	was := w.kept
	w.kept = map[neighbourKey]*keptNeighbour{}
	for k := range want {
		var v neighbourValue
		if err := w.pins.Maps[pinNeighbours].Lookup(k, &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // the operator's, or one that has not answered yet
		} else if err != nil {
			return err
		}
		n, err := find(k)
		if err != nil {
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

// hears takes what a neighbour told.
func (w *watcher) hears(e *ears, t told) {
	n := w.kept[t.key]
	switch {
	case n == nil:
	case t.mac == nil && n.times >= askOnly: // it answers all of the link, and says nothing
	case t.mac == nil || bytes.Equal(t.mac, n.mac):
		n.heard, n.times, n.other = time.Now(), 0, nil
	case n.times >= askOnly: // the old one does not answer
		w.believe(t.key, n, t)
	case !bytes.Equal(n.other, t.mac):
		n.other, n.since = t.mac, time.Now()
		w.asks(e, t.key, n, false)
	}
}

// believe gives the kernel's entry the address; repairs follow that ([watcher.neighbour]).
func (w *watcher) believe(k neighbourKey, n *keptNeighbour, t told) {
	var v neighbourValue
	copy(v.MAC[:], t.mac)
	if err := w.ns.Do(func() error { return setNeighbour(k, v, netlink.NUD_PERMANENT) }); err != nil {
		w.log.Warn("a neighbour's new link address is not taken", "neighbour", k.addr(), "err", err)
		return
	}
	name := ""
	if l := w.links[int(k.Ifindex)]; l != nil {
		name = l.name
	}
	w.log.Info("neighbour has a new link address", "neighbour", k.addr(), "interface", name, "old", n.mac, "new", t.mac)
	n.mac, n.heard, n.times, n.other = t.mac, time.Now(), 0, nil
	w.follow()
}

func (w *watcher) asks(e *ears, k neighbourKey, n *keptNeighbour, everybody bool) {
	n.asked = time.Now()
	_ = w.ns.Do(func() error { return w.ask(e, k, n, everybody) }) // a link that is down: it is asked again
}

// inquire asks neighbours that were not heard for long, or whose link is down.
func (w *watcher) inquire(e *ears) {
	now := time.Now()
	for k, n := range w.kept {
		if n.other != nil && now.Sub(n.since) >= verify {
			w.believe(k, n, told{k, n.other})
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
		if n.times > 5*askOnly {
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
