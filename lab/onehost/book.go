// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"bytes"
	"encoding/gob"
	"hash/fnv"
	"maps"
)

// book is a collector's state of one BMP session. All of it moves with the session.
type book struct {
	Messages, Bytes uint64 // complete messages
	Initiations     uint64
	Statistics      uint64
	Hash            uint64 // of every byte, in order
	Peers           map[peerKey]*peerBook
	Moves, Crashes  uint64 // moves from another process, and from a dead one
	Partial         uint64 // moves with a part of a message
}

// peerBook is a collector's state of a router's peer, before or after policy.
type peerBook struct {
	Ups, Downs  uint64
	EndsOfRIB   uint64
	Updates     uint64
	Hash        uint64           // of all its updates, in order
	Table       map[route]uint64 // announced routes, with a hash of their attributes
	Repetitions uint64           // announcements already in the table with the same attributes
}

// route is an IPv4 prefix: its length in bits, its address.
type route [5]byte

func newBook() *book { return &book{Peers: map[peerKey]*peerBook{}} }

func (b *book) peer(k peerKey) *peerBook {
	p := b.Peers[k]
	if p == nil {
		p = &peerBook{Table: map[route]uint64{}}
		b.Peers[k] = p
	}
	return p
}

// hashOn continues a hash with b.
func hashOn(h uint64, b []byte) uint64 {
	f := fnv.New64a()
	f.Write(be.AppendUint64(nil, h))
	f.Write(b)
	return f.Sum64()
}

// add enters all complete messages of in and returns the number of remaining bytes.
func (b *book) add(in []byte) (rest int, err error) {
	for {
		m, n, err := next(in)
		if err != nil || n == 0 {
			return len(in), err
		}
		if err := b.enter(m); err != nil {
			return len(in), err
		}
		b.Messages++
		b.Bytes += uint64(n)
		b.Hash = hashOn(b.Hash, in[:n])
		in = in[n:]
	}
}

func (b *book) enter(m message) error {
	switch m.kind {
	case initiation:
		b.Initiations++
	case statistics:
		b.Statistics++
	case peerUp:
		b.peer(m.peer).Ups++
	case peerDown:
		p := b.peer(m.peer)
		p.Downs++
		clear(p.Table)
	case routeMonitoring:
		return b.peer(m.peer).update(m.body)
	}
	return nil
}

func (p *peerBook) update(b []byte) error {
	u, err := parseUpdate(b)
	if err != nil {
		return err
	}
	p.Updates++
	p.Hash = hashOn(p.Hash, b)
	if u.endOfRIB() {
		p.EndsOfRIB++
	}
	for _, r := range u.withdrawn {
		delete(p.Table, parseRoute(r))
	}
	if len(u.announced) == 0 {
		return nil
	}
	attributes := hashOn(0, u.attributes)
	for _, r := range u.announced {
		if p.Table[parseRoute(r)] == attributes {
			p.Repetitions++
		}
		p.Table[parseRoute(r)] = attributes
	}
	return nil
}

func parseRoute(b []byte) (r route) {
	copy(r[:], b)
	return r
}

// state returns the committed state of the session.
func (b *book) state() ([]byte, error) {
	var out bytes.Buffer
	err := gob.NewEncoder(&out).Encode(b)
	return out.Bytes(), err
}

// restore returns the book of a session with this state; empty for a new session.
func restore(state []byte) (*book, error) {
	b := newBook()
	if len(state) == 0 {
		return b, nil
	}
	return b, gob.NewDecoder(bytes.NewReader(state)).Decode(b)
}

// dumps returns the number of whole tables in the session: End-of-RIB marks of the peer with the most.
func (b *book) dumps() (n uint64) {
	for _, p := range b.Peers {
		n = max(n, p.EndsOfRIB)
	}
	return n
}

// ups returns the number of Peer Ups of the peer with the most.
func (b *book) ups() (n uint64) {
	for _, p := range b.Peers {
		n = max(n, p.Ups)
	}
	return n
}

// routes counts the routes of all peers.
func (b *book) routes() (n int) {
	for _, p := range b.Peers {
		n += len(p.Table)
	}
	return n
}

// sameTables reports whether two sessions have the same routes.
func (b *book) sameTables(o *book) bool {
	return maps.EqualFunc(b.Peers, o.Peers, func(p, q *peerBook) bool { return maps.Equal(p.Table, q.Table) })
}
