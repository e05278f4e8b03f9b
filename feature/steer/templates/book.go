// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/ipfix"
)

// Bounds of the sessions remembered in one network namespace. maxSessions is
// TEMPLATES_SESSIONS. Bytes are by [FlowSession.Size]. Newcomers are sessions that
// may be forged, see [proven]: they never push out the others.
const (
	maxSessions          = 32768
	maxBookBytes         = 18 << 20
	maxNewcomers         = maxSessions / 2
	maxNewcomerBytes     = 14 << 20
	maxSessionsOfAddress = 256            // one exporter's domains, or ports that it changes with every message
	maxAddressBytes      = 256 << 10      // of one address
	maxSessionTemplates  = 256            // of one observation domain
	maxSessionBytes      = 16 << 10       // of one observation domain's template records
	sessionLife          = 24 * time.Hour // of silence
	newcomerLife         = time.Hour      // of silence, of a newcomer
	supersededLife       = 10 * time.Minute
)

// sessionBytes and templateBytes are about what weir serve keeps of a session and of a
// template, apart from the template's record.
const (
	sessionBytes  = 256
	templateBytes = 48
)

// A session is proven once it was heard so often, and over such a time. A flood of
// forged addresses says each of them once.
const (
	ProvenMessages = 3
	ProvenAge      = 30 * time.Second
)

// errNoRoom says that a session already has as many templates as fit.
var errNoRoom = errors.New("more templates than are remembered of one observation domain")

// MemberID is the process that has a slot; the zero value is nobody.
type MemberID struct {
	Tgid  uint32
	Start uint64 // clock ticks since boot
}

// FlowSession is what is remembered of one observation domain of one exporter.
type FlowSession struct {
	Templates []ipfix.Template
	Served    MemberID // who has the templates
	Learnt    int64    // ns since the epoch, of the latest change
	Replayed  int64    // ns since the epoch, of the latest replay; 0: never
	Replays   uint32
	Born      uint64 // CLOCK_MONOTONIC, ns, when it was first learnt

	Bytes      int
	Proven     bool
	tries      int    // replays to Served that the member's socket may have dropped
	Generation uint32 // in the store
	Chunks     int    // in the store
}

// Size is about the memory of weir serve that a session takes, bytes.
func (s *FlowSession) Size() int { return sessionBytes + templateBytes*len(s.Templates) + s.Bytes }

// BookUse is a number of sessions and the sum of their sizes.
type BookUse struct{ Sessions, Bytes int }

func (u *BookUse) add(sessions, bytes int) {
	u.Sessions += sessions
	u.Bytes += bytes
}

// Book holds the sessions of one network namespace.
type Book struct {
	Sessions  map[bpf.TemplatesSession]*FlowSession
	Of        map[[16]byte]*BookUse // by source address
	Newcomers BookUse
	Bytes     int
}

// newBook makes an empty book.
func newBook() *Book {
	return &Book{Sessions: map[bpf.TemplatesSession]*FlowSession{}, Of: map[[16]byte]*BookUse{}}
}

// Add puts a session into the book, and counts it.
func (b *Book) Add(k bpf.TemplatesSession, s *FlowSession) {
	b.Sessions[k] = s
	b.charge(k, s, 1, s.Size())
}

// Remove takes a session out of the book.
func (b *Book) Remove(k bpf.TemplatesSession) {
	s := b.Sessions[k]
	if s == nil {
		return
	}
	delete(b.Sessions, k)
	b.charge(k, s, -1, -s.Size())
}

// grown notes that a session's size was another one before.
func (b *Book) grown(k bpf.TemplatesSession, s *FlowSession, before int) {
	b.charge(k, s, 0, s.Size()-before)
}

func (b *Book) charge(k bpf.TemplatesSession, s *FlowSession, sessions, bytes int) {
	u := b.Of[k.Src]
	if u == nil {
		u = &BookUse{}
		b.Of[k.Src] = u
	}
	u.add(sessions, bytes)
	if u.Sessions == 0 {
		delete(b.Of, k.Src)
	}
	if !s.Proven {
		b.Newcomers.add(sessions, bytes)
	}
	b.Bytes += bytes
}

// prove notes that a session is not forged, or was forged with effort.
func (b *Book) prove(s *FlowSession) {
	if !s.Proven {
		s.Proven = true
		b.Newcomers.add(-1, -s.Size())
	}
}

// crowd is a group of sessions that takes more room than it may.
type crowd int

const (
	crowdNone crowd = iota
	crowdAddress
	crowdNewcomers
	crowdAll
)

// crowded returns the first group that takes too much room, with a session of src.
func (b *Book) crowded(src [16]byte) crowd {
	switch u := b.Of[src]; {
	case u != nil && (u.Sessions > maxSessionsOfAddress || u.Bytes > maxAddressBytes):
		return crowdAddress
	case b.Newcomers.Sessions > maxNewcomers || b.Newcomers.Bytes > maxNewcomerBytes:
		return crowdNewcomers
	case len(b.Sessions) > maxSessions || b.Bytes > maxBookBytes:
		if b.Newcomers.Sessions > maxSessions/8 || b.Newcomers.Bytes > maxBookBytes/8 {
			return crowdNewcomers
		}
		return crowdAll
	}
	return crowdNone
}

// eased says that newcomers are so far from their bounds that no room has to be made for a while.
func (b *Book) eased() bool {
	const others = crowdShare - 1
	return b.Newcomers.Sessions*crowdShare < maxNewcomers*others && b.Newcomers.Bytes*crowdShare < maxNewcomerBytes*others
}

// crowdShare is the share of a crowd that makes room at a time: to look for the silent ones
// costs time.
const crowdShare = 16

// silent returns the share of a crowd that was silent longest, at least one session and never
// except. last tells when a session was heard. An exporter that sends is not pushed out by
// forged ones that sent once.
func (b *Book) silent(c crowd, except bpf.TemplatesSession, last func(bpf.TemplatesSession) uint64) []bpf.TemplatesSession {
	type silent struct {
		key  bpf.TemplatesSession
		last uint64
	}
	var all []silent
	for k, s := range b.Sessions {
		if k == except || c == crowdAddress && k.Src != except.Src || c == crowdNewcomers && s.Proven {
			continue
		}
		all = append(all, silent{k, last(k)})
	}
	slices.SortFunc(all, func(a, b silent) int { return cmp.Compare(a.last, b.last) })
	var out []bpf.TemplatesSession
	for _, s := range all[:min(len(all), len(all)/crowdShare+1)] {
		out = append(out, s.key)
	}
	return out
}

// current tells sessions from those that their exporter has given up: one that
// restarts sends from another port, and many collectors know it by its address
// and domain alone, so that the old templates would take the new ones' place. A
// session is superseded while it was not heard since another of its exporter,
// domain and collector was first learnt.
func (b *Book) current(last func(bpf.TemplatesSession) uint64) func(bpf.TemplatesSession) bool {
	type newest struct {
		key  bpf.TemplatesSession
		born uint64
	}
	by := map[bpf.TemplatesSession]newest{}
	of := func(k bpf.TemplatesSession) bpf.TemplatesSession { k.Sport = 0; return k }
	for k, s := range b.Sessions {
		if n, ok := by[of(k)]; !ok || s.Born > n.born {
			by[of(k)] = newest{k, s.Born}
		}
	}
	return func(k bpf.TemplatesSession) bool {
		n := by[of(k)]
		return n.key == k || last(k) >= n.born
	}
}

// apply enters what a message says of templates and tells how many are new or
// gone. A template of a number that is taken replaces the one that had it.
func (s *FlowSession) apply(changes []ipfix.Change) (changed int, err error) {
	for _, c := range changes {
		if c.Withdrawn != nil {
			changed += s.withdraw(*c.Withdrawn)
			continue
		}
		put, perr := s.Put(*c.Template)
		if put {
			changed++
		}
		err = errors.Join(err, perr)
	}
	return changed, err
}

func (s *FlowSession) index(id uint16) int {
	return slices.IndexFunc(s.Templates, func(t ipfix.Template) bool { return t.ID == id })
}

// Put enters a template, unless it is there already or has no room.
func (s *FlowSession) Put(t ipfix.Template) (bool, error) {
	i := s.index(t.ID)
	if i >= 0 && s.Templates[i].Equal(t) {
		return false, nil
	}
	grown := len(t.Record)
	if i >= 0 {
		grown -= len(s.Templates[i].Record)
	}
	if s.Bytes+grown > maxSessionBytes || i < 0 && len(s.Templates) >= maxSessionTemplates {
		return false, errNoRoom
	}
	t.Record = bytes.Clone(t.Record) // it shares the buffer that it was read into
	s.Bytes += grown
	if i >= 0 {
		s.Templates[i] = t
	} else {
		s.Templates = append(s.Templates, t)
	}
	return true, nil
}

func (s *FlowSession) withdraw(w ipfix.Withdrawal) int {
	before := len(s.Templates)
	s.Templates = slices.DeleteFunc(s.Templates, func(t ipfix.Template) bool {
		gone := t.ID == w.ID || w.All && t.Options == (w.ID == 3)
		if gone {
			s.Bytes -= len(t.Record)
		}
		return gone
	})
	return before - len(s.Templates)
}

// nextSequence is the sequence number that the exporter's next message will
// have. NetFlow v9 counts messages; ipfix.IPFIX counts data records, so those of the
// latest message are counted by its sets' lengths. exact is false where they
// cannot be, because records vary in length: a collector then notes a gap once.
func (s *FlowSession) nextSequence(k bpf.TemplatesSession, h bpf.TemplatesHeard) (next uint32, exact bool) {
	if k.Version == ipfix.NetFlow9 {
		return h.Sequence + 1, true
	}
	next, exact = h.Sequence, h.Sets <= uint32(len(h.Set))
	for _, set := range h.Set[:min(int(h.Sets), len(h.Set))] {
		if set.Id < ipfix.MinTemplateID {
			continue // templates
		}
		i := s.index(set.Id)
		if i < 0 {
			exact = false
			continue
		}
		if n := s.Templates[i].DataLength(k.Version); n > 0 && set.Length >= 4 {
			next += uint32(int(set.Length-4) / n)
		} else {
			exact = false
		}
	}
	return next, exact
}

// heardAs is a message as the filter would have noted it, had the session been
// known.
func heardAs(m *ipfix.Message, ifindex uint32, now uint64) bpf.TemplatesHeard {
	h := bpf.TemplatesHeard{Last: now, Messages: 1, Sequence: m.Sequence, ExportTime: m.ExportTime, Uptime: m.Uptime,
		Ifindex: ifindex, Sets: uint32(len(m.Sets))}
	for i, d := range m.Sets[:min(len(m.Sets), len(h.Set))] {
		h.Set[i].Id, h.Set[i].Length = d.ID, d.Length
	}
	return h
}

// replay is the messages that give a session's templates to a new member. Their
// header continues the latest message that was heard, in the exporter's own time.
func (s *FlowSession) replay(k bpf.TemplatesSession, h bpf.TemplatesHeard, limit int) [][]byte {
	next, _ := s.nextSequence(k, h)
	head := ipfix.Header{Version: k.Version, Domain: k.Domain, ExportTime: h.ExportTime, Uptime: h.Uptime}
	return replayMessages(head, next, s.Templates, limit)
}

// Templates counts the templates of all sessions.
func (b *Book) Templates() (n int) {
	for _, s := range b.Sessions {
		n += len(s.Templates)
	}
	return n
}

// exporterAddr is the address and port that a session's exporter sends from.
func exporterAddr(k bpf.TemplatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Src).Unmap(), k.Sport)
}

// collectorAddr is the address and port that it sends to.
func collectorAddr(k bpf.TemplatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Dst).Unmap(), k.Dport)
}
