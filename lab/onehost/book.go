// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"bytes"
	"encoding/gob"
	"hash/fnv"
	"maps"
)

// book is what a collector knows of one BMP session: all of it goes with the session.
type book struct {
	Messages, Bytes uint64 // whole ones
	Initiations     uint64
	Statistics      uint64
	Hash            uint64 // of every byte, one after the other
	Peers           map[peerKey]*peerBook
	Moves, Crashes  uint64 // how often the session has come from another process, and from one that died
	Partial         uint64 // how often a part of a message came along
}

// peerBook is what a collector knows of a router's peer, before or after policy.
type peerBook struct {
	Ups, Downs  uint64
	EndsOfRIB   uint64
	Updates     uint64
	Hash        uint64           // of all its updates, one after the other
	Table       map[route]uint64 // the routes that are announced, with a hash of their attributes
	Repetitions uint64           // announcements of what the table has already, with the same attributes
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

// hashOn continues a hash with what follows.
func hashOn(h uint64, b []byte) uint64 {
	f := fnv.New64a()
	f.Write(be.AppendUint64(nil, h))
	f.Write(b)
	return f.Sum64()
}

// add enters all whole messages of b and returns how many bytes are left over.
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

// state is what is committed with the session.
func (b *book) state() ([]byte, error) {
	var out bytes.Buffer
	err := gob.NewEncoder(&out).Encode(b)
	return out.Bytes(), err
}

// restore is the book of a session with this state; that of a new one is empty.
func restore(state []byte) (*book, error) {
	b := newBook()
	if len(state) == 0 {
		return b, nil
	}
	return b, gob.NewDecoder(bytes.NewReader(state)).Decode(b)
}

// dumps is how many whole tables the session has brought: by the mark behind each, of the peer that has most.
func (b *book) dumps() (n uint64) {
	for _, p := range b.Peers {
		n = max(n, p.EndsOfRIB)
	}
	return n
}

// ups is how often the session has said that a peer is up: of the peer of which most often.
func (b *book) ups() (n uint64) {
	for _, p := range b.Peers {
		n = max(n, p.Ups)
	}
	return n
}

// routes are those of all peers together.
func (b *book) routes() (n int) {
	for _, p := range b.Peers {
		n += len(p.Table)
	}
	return n
}

// sameTables says whether two sessions have led to the same routes.
func (b *book) sameTables(o *book) bool {
	return maps.EqualFunc(b.Peers, o.Peers, func(p, q *peerBook) bool { return maps.Equal(p.Table, q.Table) })
}
