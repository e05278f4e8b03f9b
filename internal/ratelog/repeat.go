// SPDX-License-Identifier: Apache-2.0

package ratelog

import (
	"hash/maphash"
	"log/slog"
	"time"
)

// lines are the lines of one message and party.
type lines struct {
	bucket
	same map[uint64]*line // by hash of their words
	said time.Time        // time of the latest logged repeated one
}

// line is one line with all its words.
type line struct {
	times      int // it was logged, each within repeatEvery of the previous one
	logged     time.Time
	suppressed int               // since
	latest     time.Time         // time of the latest suppression
	later      func(missing int) // logs the latest suppressed one
}

// latest is a line to log after its pause.
type latest struct {
	at  time.Time
	log func()
}

var seed = maphash.MakeSeed()

// words hashes everything in a line besides its message.
func (h *handler) words(r slog.Record) uint64 {
	var m maphash.Hash
	m.SetSeed(seed)
	_ = m.WriteByte(byte(r.Level)) // never fails, nor does WriteString
	_, _ = m.WriteString(h.with)
	r.Attrs(func(a slog.Attr) bool {
		_, _ = m.WriteString("\x00" + a.Key + "=" + a.Value.Resolve().String())
		return true
	})
	return m.Sum64()
}

// line returns the state of a line. A new one may replace the one logged first.
func (b *lines) line(words uint64, now time.Time) *line {
	l := b.same[words]
	if l != nil && now.Sub(l.logged) > repeatEvery+tellAfter {
		l.times = 0
	}
	if l != nil {
		return l
	}
	if len(b.same) >= maxLines {
		var first uint64
		for k, x := range b.same {
			if o := b.same[first]; o == nil || x.logged.Before(o.logged) {
				first = k
			}
		}
		b.suppressed += b.same[first].suppressed
		delete(b.same, first)
	}
	if b.same == nil {
		b.same = map[uint64]*line{}
	}
	l = &line{}
	b.same[words] = l
	return l
}

// pending returns the number of suppressed lines since the last report.
func (b *lines) pending() (n int) {
	n = b.suppressed
	for _, l := range b.same {
		n += l.suppressed
	}
	return n
}

// paused returns suppressed lines that no longer repeat, as far as there are tokens. Each includes
// its count. A line older than said, the latest repeated line about the party, is only counted. So
// of alternating lines the latest is last in the log.
func (m *message) paused(b *lines, said, now time.Time) (out []latest) {
	for _, l := range b.same {
		if l.suppressed == 0 || now.Sub(l.latest) < pause {
			continue
		}
		if l.latest.Before(said) {
			b.suppressed += l.suppressed
			l.suppressed, l.later = 0, nil
			continue
		}
		if !m.spend(b, now) {
			continue
		}
		log, missing := l.later, l.suppressed-1+b.suppressed
		out = append(out, latest{l.latest, func() { log(missing) }})
		b.said = later(b.said, l.latest)
		l.logged, l.suppressed, l.later, b.suppressed = now, 0, nil, 0
	}
	return out
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// untold returns the number of suppressed lines not covered by a later line. more reports whether
// others wait for a repetition or for the pause.
func (b *lines) untold() (n int, more bool) {
	n, b.suppressed = b.suppressed, 0
	for _, l := range b.same {
		more = more || l.suppressed > 0
	}
	return n, more
}
