// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"net/netip"
	"sync"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// tally holds the counts of the collectors of one way: records of IPFIX and routes of BMP, by device and
// epoch.
type tally struct {
	mu    sync.Mutex
	seen  map[key]int
	ups   map[netip.Addr]int // Peer Ups
	heard map[[2]int]bool    // collector and its life: true after a flow record
	odd   []string
}

type key struct {
	proto  routers.Protocol
	epoch  uint32
	device netip.Addr
}

func newTally() *tally {
	return &tally{seen: map[key]int{}, ups: map[netip.Addr]int{}, heard: map[[2]int]bool{}}
}

// book enters one line of a collector's output.
func (t *tally) book(collector int, r peers.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch r.Kind {
	case peers.Flows:
		t.seen[key{routers.IPFIX, r.Epoch, r.Device}] += r.Count
		t.heard[[2]int{collector, r.Incarnation}] = true
	case peers.Route:
		t.seen[key{routers.BMP, r.Epoch, r.Device}]++
	case peers.PeerUp:
		t.ups[r.Device]++
	case peers.Odd:
		t.odd = append(t.odd, r.Text)
	}
}

// of returns the count of a device in an epoch.
func (t *tally) of(p routers.Protocol, epoch uint32, device netip.Addr) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen[key{p, epoch, device}]
}

// up returns the number of devices with logged sessions.
func (t *tally) up() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.ups)
}

func (t *tally) countUps(device netip.Addr) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ups[device]
}

// hears reports whether a collector has written flow records in its current life.
func (t *tally) hears(c *peers.Collector) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.heard[[2]int{c.Number, c.Life()}]
}

// oddities returns the unexpected lines.
func (t *tally) oddities() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.odd
}
