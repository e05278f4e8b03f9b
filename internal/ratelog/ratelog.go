// SPDX-License-Identifier: Apache-2.0

// Package ratelog limits the log lines that strangers can cause. Every message has a rate per party
// and a rate for all parties. It counts the suppressed lines and logs the count. A line repeated
// word for word, for example about a peer retrying each second, is logged once a minute after its
// first occurrences.
package ratelog

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Rates, in lines. A party's burst is smaller than a message's, so a flood of one user does not
// suppress lines about others.
const (
	partyBurst   = 20
	partyRate    = 1 // per second
	messageBurst = 1000
	messageRate  = 10
	maxParties   = 1024 // per message
	maxMessages  = 1024
	tellAfter    = 5 * time.Second

	// After maxRepeats occurrences, an identical line is logged once per repeatEvery.
	maxRepeats  = 20
	repeatEvery = time.Minute
	// pause is the quiet time after which the last suppressed line is logged anyway. It is the
	// latest state, for example the end of an outage of a flapping link.
	pause    = 10 * time.Second
	maxLines = 8 // remembered distinct lines per party
)

// strangers is the number of leading keys in parties for strangers. A stranger chooses all else in
// a line about him.
const strangers = 3

// parties are the attribute keys naming the party of a line, the most reliable first.
var parties = [...]string{"uid", "peer", "remote", // strangers, as named by the kernel
	"service", "name", "host", "netns", "interface"}

// Limit returns a logger that limits the lines of l. It returns a limited logger unchanged.
func Limit(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	if _, ok := l.Handler().(*handler); ok {
		return l
	}
	return slog.New(newHandler(l.Handler()))
}

// newHandler limits the records passed to h.
func newHandler(h slog.Handler) slog.Handler {
	return &handler{Handler: h, limits: &limits{out: h, messages: map[string]*message{}}}
}

type handler struct {
	slog.Handler
	limits *limits
	with   string // added by WithAttrs and WithGroup
}

// Handle implements slog.Handler.
func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	later := func(missing int) { _ = h.handle(context.Background(), r.Clone(), missing) } // there is no caller for the error
	ok, missing := h.limits.allow(r.Message, party(r), h.words(r), later, time.Now())
	if !ok {
		return nil
	}
	return h.handle(ctx, r, missing)
}

func (h *handler) handle(ctx context.Context, r slog.Record, missing int) error {
	if missing > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("suppressed", missing))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *handler) WithAttrs(a []slog.Attr) slog.Handler {
	with := h.with
	for _, x := range a {
		with += "\x00" + x.String()
	}
	return &handler{h.Handler.WithAttrs(a), h.limits, with}
}

// WithGroup implements slog.Handler.
func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.Handler.WithGroup(name), h.limits, h.with + "\x00" + name}
}

// party returns the party of a record.
func party(r slog.Record) (who string) {
	best, slot := len(parties), ""
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "slot" {
			slot = a.Value.String()
		}
		for i, key := range parties[:best] {
			if a.Key == key {
				best, who = i, network(a.Value.String())
				break
			}
		}
		return true
	})
	if slot != "" && best >= strangers {
		who += "/" + slot
	}
	return who
}

// network returns the network of an address with a port, because a peer has many ports.
func network(s string) string {
	at, err := netip.ParseAddrPort(s)
	if err != nil {
		return s
	}
	a, bits := at.Addr().Unmap().WithZone(""), 32
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // the prefix is never longer than the address
	return p.String()
}

// limits are shared by a handler and its derived handlers.
type limits struct {
	out slog.Handler

	mu       sync.Mutex
	messages map[string]*message
	timer    bool
}

// message is the state of a message's lines.
type message struct {
	all     bucket
	parties map[string]*lines
}

// bucket is a token bucket.
type bucket struct {
	tokens     float64
	at         time.Time
	suppressed int
}

func (b *bucket) fill(now time.Time, rate, burst float64) {
	b.tokens = min(burst, b.tokens+rate*now.Sub(b.at).Seconds())
	b.at = now
}

// allow reports whether a line may be logged, and the number of its party's lines suppressed
// before. later logs the line together with that number.
func (l *limits) allow(text, who string, words uint64, later func(missing int), now time.Time) (ok bool, missing int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.messages[text]
	if m == nil {
		if len(l.messages) >= maxMessages {
			text = ""
		}
		if m = l.messages[text]; m == nil {
			m = &message{all: bucket{tokens: messageBurst, at: now}, parties: map[string]*lines{}}
			l.messages[text] = m
		}
	}
	b := m.party(who, now)
	same := b.line(words, now)
	if same.times >= maxRepeats && now.Sub(same.logged) < repeatEvery {
		same.suppressed++
		same.latest, same.later = now, later
		l.tellLater()
		return false, 0
	}
	if !m.spend(b, now) {
		b.suppressed++
		l.tellLater()
		return false, 0
	}
	if same.times++; same.times > maxRepeats {
		b.said = now
	}
	missing = b.suppressed + same.suppressed
	same.logged, same.suppressed, b.suppressed = now, 0, 0
	return true, missing
}

// spend spends the tokens for a line of a party, if there are any.
func (m *message) spend(b *lines, now time.Time) bool {
	b.fill(now, partyRate, partyBurst)
	m.all.fill(now, messageRate, messageBurst)
	if b.tokens < 1 || m.all.tokens < 1 {
		return false
	}
	b.tokens--
	m.all.tokens--
	return true
}

// tellLater starts the timer for tell. l.mu is held.
func (l *limits) tellLater() {
	if !l.timer {
		l.timer = true
		time.AfterFunc(tellAfter, l.tell)
	}
}

// party returns the lines of a party. Parties beyond maxParties share one entry.
func (m *message) party(who string, now time.Time) *lines {
	if b := m.parties[who]; b != nil {
		return b
	}
	if len(m.parties) >= maxParties {
		for k, b := range m.parties {
			if b.fill(now, partyRate, partyBurst); b.tokens == partyBurst && b.pending() == 0 {
				delete(m.parties, k)
			}
		}
		if len(m.parties) >= maxParties {
			who = ""
		}
	}
	if m.parties[who] == nil {
		m.parties[who] = &lines{bucket: bucket{tokens: partyBurst, at: now}}
	}
	return m.parties[who]
}

// said returns the time of the latest logged repeated line of each party, because alternating lines
// repeat together. Lines without a party, or of parties beyond maxParties, come from many.
func (l *limits) said() map[string]time.Time {
	said := map[string]time.Time{}
	for _, m := range l.messages {
		for who, b := range m.parties {
			said[who] = later(said[who], b.said)
		}
	}
	delete(said, "")
	return said
}

// tell logs the number of lines suppressed since the last report, once per message.
func (l *limits) tell() {
	l.mu.Lock()
	l.timer = false
	now := time.Now()
	missing := map[string]int{}
	var paused []latest
	said := l.said()
	for text, m := range l.messages {
		for who, b := range m.parties {
			paused = append(paused, m.paused(b, said[who], now)...)
			n, more := b.untold()
			missing[text] += n
			if more {
				l.tellLater()
			}
		}
	}
	l.mu.Unlock()
	slices.SortFunc(paused, func(a, b latest) int { return a.at.Compare(b.at) })
	for _, l := range paused {
		l.log()
	}
	for text, n := range missing {
		if n == 0 {
			continue
		}
		r := slog.NewRecord(time.Now(), slog.LevelWarn, "log lines suppressed", 0)
		r.AddAttrs(slog.String("line", text), slog.Int("suppressed", n))
		_ = l.out.Handle(context.Background(), r) // there is no caller for the error
	}
}
