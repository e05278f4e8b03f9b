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

// Limits of the remembered sessions of one network namespace. maxSessions is TEMPLATES_SESSIONS. Bytes are counted by
// [FlowSession.Size]. Newcomers are sessions not proven yet, so they may be forged. They never displace proven
// sessions.
const (
	maxSessions          = 32768
	maxBookBytes         = 18 << 20
	maxNewcomers         = maxSessions / 2
	maxNewcomerBytes     = 14 << 20
	maxSessionsOfAddress = 256            // domains of one exporter, or ports if it changes them with every message
	maxAddressBytes      = 256 << 10      // of one address
	maxSessionTemplates  = 256            // of one observation domain
	maxSessionBytes      = 16 << 10       // template records of one observation domain
	sessionLife          = 24 * time.Hour // silence of a proven session
	newcomerLife         = time.Hour      // silence of a newcomer
	supersededLife       = 10 * time.Minute
)

// sessionBytes and templateBytes estimate the memory of a session and of a template in weir serve, without the
// template's record.
const (
	sessionBytes  = 256
	templateBytes = 48
)

// A session is proven after this number of messages over this time. A flood of forged addresses uses each address once.
const (
	ProvenMessages = 3
	ProvenAge      = 30 * time.Second
)

// errNoRoom means that a session has reached its limit of templates.
var errNoRoom = errors.New("too many templates in one observation domain")

// MemberID is the process of a slot. The zero value is none.
type MemberID struct {
	Tgid  uint32
	Start uint64 // clock ticks since boot
}

// FlowSession is the remembered state of one observation domain of one exporter.
type FlowSession struct {
	Templates []ipfix.Template
	Served    MemberID // member that has the templates
	Learnt    int64    // latest change, ns since the epoch
	Replayed  int64    // latest replay, ns since the epoch; 0: never
	Replays   uint32
	Born      uint64 // first message, CLOCK_MONOTONIC, ns

	Bytes      int
	Proven     bool
	tries      int    // replays to Served possibly dropped by the member's socket
	Generation uint32 // in the store
	Chunks     int    // in the store
}

// Size estimates the session's memory in weir serve, in bytes.
func (s *FlowSession) Size() int { return sessionBytes + templateBytes*len(s.Templates) + s.Bytes }

// BookUse is a number of sessions and the sum of their sizes.
type BookUse struct{ Sessions, Bytes int }

func (u *BookUse) add(sessions, bytes int) {
	u.Sessions += sessions
	u.Bytes += bytes
}

// Book contains the sessions of one network namespace.
type Book struct {
	Sessions  map[bpf.TemplatesSession]*FlowSession
	Of        map[[16]byte]*BookUse // by source address
	Newcomers BookUse
	Bytes     int
}

// newBook returns an empty book.
func newBook() *Book {
	return &Book{Sessions: map[bpf.TemplatesSession]*FlowSession{}, Of: map[[16]byte]*BookUse{}}
}

// Add adds a session.
func (b *Book) Add(k bpf.TemplatesSession, s *FlowSession) {
	b.Sessions[k] = s
	b.charge(k, s, 1, s.Size())
}

// Remove removes a session.
func (b *Book) Remove(k bpf.TemplatesSession) {
	s := b.Sessions[k]
	if s == nil {
		return
	}
	delete(b.Sessions, k)
	b.charge(k, s, -1, -s.Size())
}

// grown accounts for a change of a session's size. before is the previous size.
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

// prove marks a session as proven.
func (b *Book) prove(s *FlowSession) {
	if !s.Proven {
		s.Proven = true
		b.Newcomers.add(-1, -s.Size())
	}
}

// crowd is a group of sessions beyond its limit.
type crowd int

const (
	crowdNone crowd = iota
	crowdAddress
	crowdNewcomers
	crowdAll
)

// crowded returns the first group beyond its limit that a session of src belongs to.
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

// eased reports whether newcomers are well below their limits, so no session must be removed soon.
func (b *Book) eased() bool {
	const others = crowdShare - 1
	return b.Newcomers.Sessions*crowdShare < maxNewcomers*others && b.Newcomers.Bytes*crowdShare < maxNewcomerBytes*others
}

// crowdShare is the reciprocal of the share removed at a time, because finding the silent sessions is slow.
const crowdShare = 16

// silent returns the longest silent share of a crowd: at least one session, never except. last returns the time of a
// session's last message. An active exporter is not displaced by forged sessions with a single message.
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

// current returns a function that reports whether a session is still in use. A restarted exporter sends from another
// port. Many collectors identify it by address and domain only, so old templates would overwrite the new ones. A
// session is superseded if it has been silent since a newer session of the same exporter, domain and collector was
// first heard.
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

// apply applies the template changes of a message. It returns the number of new, changed and withdrawn templates. A
// template with a known number replaces the previous one.
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

// Put adds a template. It returns false if the template is known or there is no room.
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
	t.Record = bytes.Clone(t.Record) // it shares the read buffer
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

// nextSequence returns the sequence number of the exporter's next message. NetFlow v9 counts messages. IPFIX counts
// data records, so the records of the latest message are computed from its set lengths. exact is false if records vary
// in length: a collector then sees one gap.
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

// heardAs returns a message as recorded by the filter for a known session.
func heardAs(m *ipfix.Message, ifindex uint32, now uint64) bpf.TemplatesHeard {
	h := bpf.TemplatesHeard{Last: now, Messages: 1, Sequence: m.Sequence, ExportTime: m.ExportTime, Uptime: m.Uptime,
		Ifindex: ifindex, Sets: uint32(len(m.Sets))}
	for i, d := range m.Sets[:min(len(m.Sets), len(h.Set))] {
		h.Set[i].Id, h.Set[i].Length = d.ID, d.Length
	}
	return h
}

// replay returns the messages that carry a session's templates to a new member. Their header continues the latest
// received message, in the exporter's own time.
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

// exporterAddr returns the source address and port of a session.
func exporterAddr(k bpf.TemplatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Src).Unmap(), k.Sport)
}

// collectorAddr returns the destination address and port of a session.
func collectorAddr(k bpf.TemplatesSession) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Dst).Unmap(), k.Dport)
}
