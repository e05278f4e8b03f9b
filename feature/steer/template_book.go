// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"
)

// Bounds of what is remembered in one network namespace. The first is
// TEMPLATES_SESSIONS.
const (
	maxSessions          = 32768
	maxSessionsOfAddress = 256            // one exporter's domains, or ports that it changes with every message
	maxSessionTemplates  = 256            // of one observation domain
	maxSessionBytes      = 16 << 10       // of one observation domain's template records
	maxBookBytes         = 32 << 20       // of all template records
	sessionLife          = 24 * time.Hour // of silence
	supersededLife       = 10 * time.Minute
)

// errNoRoom says that a session already has as many templates as fit.
var errNoRoom = errors.New("more templates than are remembered of one observation domain")

// memberID is the process that has a slot; the zero value is nobody.
type memberID struct {
	Tgid  uint32
	Start uint64 // clock ticks since boot
}

// flowSession is what is remembered of one observation domain of one exporter.
type flowSession struct {
	Templates []template
	Served    memberID // who has the templates
	Learnt    int64    // ns since the epoch, of the latest change
	Replayed  int64    // ns since the epoch, of the latest replay; 0: never
	Replays   uint32
	Born      uint64 // CLOCK_MONOTONIC, ns, when it was first learnt

	bytes      int
	tries      int    // replays to Served that the member's socket may have dropped
	generation uint32 // in the store
	chunks     int    // in the store
}

// templateBook holds the sessions of one network namespace.
type templateBook struct {
	sessions map[templatesSession]*flowSession
	of       map[[16]byte]int // sessions of a source address
	bytes    int
}

func newTemplateBook() *templateBook {
	return &templateBook{sessions: map[templatesSession]*flowSession{}, of: map[[16]byte]int{}}
}

func (b *templateBook) add(k templatesSession, s *flowSession) {
	b.sessions[k] = s
	b.of[k.Src]++
	b.bytes += s.bytes
}

func (b *templateBook) remove(k templatesSession) {
	s := b.sessions[k]
	if s == nil {
		return
	}
	delete(b.sessions, k)
	b.bytes -= s.bytes
	if b.of[k.Src]--; b.of[k.Src] == 0 {
		delete(b.of, k.Src)
	}
}

// full says what must be made room in before a session of an address is added:
// the address's own sessions, or all of them.
func (b *templateBook) full(src [16]byte) (ofAddress, all bool) {
	return b.of[src] >= maxSessionsOfAddress, len(b.sessions) >= maxSessions || b.bytes >= maxBookBytes
}

// oldest returns the share of the sessions (of one address, if src is not nil)
// that were silent longest, at least one. last tells when one was heard. An
// exporter that sends is not pushed out by forged ones that sent once.
func (b *templateBook) oldest(src *[16]byte, share int, last func(templatesSession) uint64) []templatesSession {
	type silent struct {
		key  templatesSession
		last uint64
	}
	var all []silent
	for k := range b.sessions {
		if src == nil || k.Src == *src {
			all = append(all, silent{k, last(k)})
		}
	}
	slices.SortFunc(all, func(a, b silent) int { return cmp.Compare(a.last, b.last) })
	var out []templatesSession
	for _, s := range all[:min(len(all), len(all)/share+1)] {
		out = append(out, s.key)
	}
	return out
}

// current tells sessions from those that their exporter has given up: one that
// restarts sends from another port, and many collectors know it by its address
// and domain alone, so that the old templates would take the new ones' place. A
// session is superseded while it was not heard since another of its exporter,
// domain and collector was first learnt.
func (b *templateBook) current(last func(templatesSession) uint64) func(templatesSession) bool {
	type newest struct {
		key  templatesSession
		born uint64
	}
	by := map[templatesSession]newest{}
	of := func(k templatesSession) templatesSession { k.Sport = 0; return k }
	for k, s := range b.sessions {
		if n, ok := by[of(k)]; !ok || s.Born > n.born {
			by[of(k)] = newest{k, s.Born}
		}
	}
	return func(k templatesSession) bool {
		n := by[of(k)]
		return n.key == k || last(k) >= n.born
	}
}

// apply enters what a message says of templates and tells how many are new or
// gone. A template of a number that is taken replaces the one that had it.
func (s *flowSession) apply(changes []templateChange) (changed int, err error) {
	for _, c := range changes {
		if c.withdrawn != nil {
			changed += s.withdraw(*c.withdrawn)
			continue
		}
		put, perr := s.put(*c.template)
		if put {
			changed++
		}
		err = errors.Join(err, perr)
	}
	return changed, err
}

func (t template) equal(o template) bool {
	return t.ID == o.ID && t.Options == o.Options && bytes.Equal(t.Record, o.Record)
}

func (s *flowSession) index(id uint16) int {
	return slices.IndexFunc(s.Templates, func(t template) bool { return t.ID == id })
}

// put enters a template, unless it is there already or has no room.
func (s *flowSession) put(t template) (bool, error) {
	i := s.index(t.ID)
	if i >= 0 && s.Templates[i].equal(t) {
		return false, nil
	}
	grown := len(t.Record)
	if i >= 0 {
		grown -= len(s.Templates[i].Record)
	}
	if s.bytes+grown > maxSessionBytes || i < 0 && len(s.Templates) >= maxSessionTemplates {
		return false, errNoRoom
	}
	t.Record = bytes.Clone(t.Record) // it shares the buffer that it was read into
	s.bytes += grown
	if i >= 0 {
		s.Templates[i] = t
	} else {
		s.Templates = append(s.Templates, t)
	}
	return true, nil
}

func (s *flowSession) withdraw(w withdrawal) int {
	before := len(s.Templates)
	s.Templates = slices.DeleteFunc(s.Templates, func(t template) bool {
		gone := t.ID == w.ID || w.All && t.Options == (w.ID == 3)
		if gone {
			s.bytes -= len(t.Record)
		}
		return gone
	})
	return before - len(s.Templates)
}

// nextSequence is the sequence number that the exporter's next message will
// have. NetFlow v9 counts messages; IPFIX counts data records, so those of the
// latest message are counted by its sets' lengths. exact is false where they
// cannot be, because records vary in length: a collector then notes a gap once.
func (s *flowSession) nextSequence(k templatesSession, h templatesHeard) (next uint32, exact bool) {
	if k.Version == netflow9 {
		return h.Sequence + 1, true
	}
	next, exact = h.Sequence, h.Sets <= uint32(len(h.Set))
	for _, set := range h.Set[:min(int(h.Sets), len(h.Set))] {
		if set.Id < minTemplateID {
			continue // templates
		}
		i := s.index(set.Id)
		if i < 0 {
			exact = false
			continue
		}
		if n := s.Templates[i].dataLength(k.Version); n > 0 && set.Length >= 4 {
			next += uint32(int(set.Length-4) / n)
		} else {
			exact = false
		}
	}
	return next, exact
}

// heardAs is the message as the filter would have noted it, had the session been
// known.
func (m *flowMessage) heardAs(ifindex uint32, now uint64) templatesHeard {
	h := templatesHeard{Last: now, Messages: 1, Sequence: m.Sequence, ExportTime: m.ExportTime, Uptime: m.Uptime,
		Ifindex: ifindex, Sets: uint32(len(m.Sets))}
	for i, d := range m.Sets[:min(len(m.Sets), len(h.Set))] {
		h.Set[i].Id, h.Set[i].Length = d.ID, d.Length
	}
	return h
}

// replay is the messages that give a session's templates to a new member. Their
// header continues the latest message that was heard, in the exporter's own time.
func (s *flowSession) replay(k templatesSession, h templatesHeard, limit int) [][]byte {
	next, _ := s.nextSequence(k, h)
	head := flowHeader{Version: k.Version, Domain: k.Domain, ExportTime: h.ExportTime, Uptime: h.Uptime}
	return replayMessages(head, next, s.Templates, limit)
}

func (b *templateBook) templates() (n int) {
	for _, s := range b.sessions {
		n += len(s.Templates)
	}
	return n
}

// exporterOf is the address and port that a session's exporter sends from.
func exporterOf(k templatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Src).Unmap(), k.Sport)
}

// collectorOf is the address and port that it sends to.
func collectorOf(k templatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Dst).Unmap(), k.Dport)
}
