// SPDX-License-Identifier: Apache-2.0

package ratelog

import (
	"hash/maphash"
	"log/slog"
	"time"
)

// lines are one message's lines about one party.
type lines struct {
	bucket
	same map[uint64]*line // by their words
	said time.Time        // when the latest repeated one that was logged happened
}

// line is one line, in all its words.
type line struct {
	times      int // that it was logged, each within repeatEvery of the one before
	logged     time.Time
	suppressed int               // since
	latest     time.Time         // that it was suppressed
	later      func(missing int) // logs that one
}

// latest is a line to be logged after its pause.
type latest struct {
	at  time.Time
	log func()
}

var seed = maphash.MakeSeed()

// words stands for all that a line says beside its message.
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

// line is what is known of a line. The one that was logged first makes room for another.
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

// pending is how many lines were suppressed since the last one that told.
func (b *lines) pending() (n int) {
	n = b.suppressed
	for _, l := range b.same {
		n += l.suppressed
	}
	return n
}

// paused are the lines that were suppressed and do not repeat any more, to be logged as far as there are tokens. Each counts
// those before it. One that happened before the latest repeated line about the party, at said, is not logged but counted: of
// lines that alternate, the latest stands last in the log.
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

// untold is how many suppressed lines no line is going to tell, which are told now. more says that some wait for a line that
// repeats, or for the pause after it.
func (b *lines) untold() (n int, more bool) {
	n, b.suppressed = b.suppressed, 0
	for _, l := range b.same {
		more = more || l.suppressed > 0
	}
	return n, more
}
