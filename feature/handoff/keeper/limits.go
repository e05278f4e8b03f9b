// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/strictyaml"
)

// Limits are the section handoff.keeper of weir.yaml. Zero values mean the defaults of Options.
type Limits struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Hold           time.Duration `yaml:"hold" json:"hold,omitempty" zero:"default"`                                   // maximum wait of a session for a member
	Grace          time.Duration `yaml:"grace" json:"grace,omitempty" zero:"default"`                                 // wait for a member of its own name, before others
	Sessions       int           `yaml:"max_sessions" json:"max_sessions,omitempty" former:"sessions" zero:"default"` // sockets of one user in one service
	State          Size          `yaml:"max_state" json:"max_state,omitempty" former:"state" zero:"default"`          // of one session
	Total          Size          `yaml:"max_total" json:"max_total,omitempty" former:"total" zero:"default"`          // of all sessions, divided by shares
	Allow          Rules         `yaml:"allow" json:"allow,omitempty"`                                                // members besides the file's services
}

// Size is a number of bytes, written like 64KiB or 1MiB.
type Size int64

var sizeUnits = []struct {
	name  string
	bytes int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}, {"", 1}}

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	number := strings.TrimRight(text, "BKMGi")
	unit := text[len(number):]
	n, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
	for _, u := range sizeUnits {
		if u.name == unit && err == nil && n >= 0 && n <= (1<<62)/u.bytes {
			*s = Size(n * u.bytes)
			return nil
		}
	}
	return fmt.Errorf("%q: want a number of bytes, like 64KiB or 1MiB", text)
}

// MarshalText implements encoding.TextMarshaler.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// String formats the size for plans.
func (s Size) String() string {
	for _, u := range []int{2, 1, 0} {
		if b := sizeUnits[u].bytes; s != 0 && int64(s)%b == 0 {
			return fmt.Sprint(int64(s)/b, sizeUnits[u].name)
		}
	}
	return fmt.Sprint(int64(s), "B")
}

// Bounds of configured values.
const (
	longest      = 24 * time.Hour
	maxKept      = 1_000_000
	largestState = Size(256 << 20) // wire.MaxState: the largest size in a message
	largestTotal = Size(64 << 30)
)

// Validate checks rules beyond the types. Errors contain the position in the file and the key.
func (l *Limits) Validate() []error {
	var errs []error
	for _, p := range l.Problems() {
		errs = append(errs, l.Pos.At(p.Key).Errorf("handoff.keeper.%s: %s", p.Key, p.Text))
	}
	for _, r := range l.Allow {
		if r.Kind == "pidfile" && !filepath.IsAbs(r.Value) {
			errs = append(errs, l.Pos.At("allow").Errorf("handoff.keeper.allow: %q: use an absolute path: weir serve has its own working directory", r))
		}
	}
	return errs
}

// Problem describes an invalid value of a key.
type Problem struct{ Key, Text string }

// Problems returns the problems of all keys.
func (l *Limits) Problems() (out []Problem) {
	fail := func(key, format string, a ...any) { out = append(out, Problem{key, fmt.Sprintf(format, a...)}) }
	if l.Hold < 0 || l.Hold > longest {
		fail("hold", "%v: want a time from 1ms to %v", l.Hold, longest)
	}
	if l.Grace < 0 || l.Grace > longest {
		fail("grace", "%v: want a time from 1ms to %v", l.Grace, longest)
	}
	w := l.withDefaults()
	if w.Grace > w.Hold {
		fail("grace", "%v is longer than hold, %v: sessions would be reset before another member can take them", w.Grace, w.Hold)
	}
	if l.Sessions < 0 || l.Sessions > maxKept {
		fail("max_sessions", "%d: want a number from 1 to %d", l.Sessions, maxKept)
	}
	if l.State < 0 || l.State > largestState {
		fail("max_state", "%v: want at most %v for a session", l.State, largestState)
	}
	if l.Total < 0 || l.Total > largestTotal {
		fail("max_total", "%v: want at most %v", l.Total, largestTotal)
	}
	if w.State > w.Total {
		fail("max_state", "%v for one session is more than max_total, %v, for all", w.State, w.Total)
	}
	return out
}

// withDefaults returns the effective limits.
func (l Limits) withDefaults() Limits {
	o := Options{Hold: l.Hold, Grace: l.Grace, MaxSessions: l.Sessions, MaxState: int64(l.State), MaxTotal: int64(l.Total)}
	o.setDefaults()
	return Limits{Hold: o.Hold, Grace: o.Grace, Sessions: o.MaxSessions, State: Size(o.MaxState), Total: Size(o.MaxTotal), Allow: l.Allow}
}

// same reports whether two limits are equal, apart from their positions in a file.
func (l Limits) same(o Limits) bool {
	l, o = l.withDefaults(), o.withDefaults()
	return l.Hold == o.Hold && l.Grace == o.Grace && l.Sessions == o.Sessions && l.State == o.State && l.Total == o.Total && slices.Equal(l.Allow, o.Allow)
}

// String formats the limits for plans.
func (l Limits) String() string {
	l = l.withDefaults()
	out := fmt.Sprintf("hold %v, grace %v, max_sessions %d, max_state %v, max_total %v", l.Hold, l.Grace, l.Sessions, l.State, l.Total)
	for _, r := range l.Allow {
		out += ", allow " + r.String()
	}
	return out
}

// Limit changes the limits of a running keeper, and sends them to its members. It drops nothing: sessions above a
// lower limit stay, and so do members no longer allowed.
func (k *Keeper) Limit(l Limits) {
	l = l.withDefaults()
	noUser := l.Allow.noUser() // may read files, so without the lock
	k.mu.Lock()
	defer k.mu.Unlock()
	if !slices.Equal(k.rules, l.Allow) {
		for _, r := range noUser {
			k.Log.Warn("no such user in /etc/passwd, rule matches nobody", "allow", r.String())
		}
	}
	was := k.MaxState
	tell := was != int64(l.State) || k.MaxSessions != l.Sessions
	k.Hold, k.Grace, k.MaxSessions, k.MaxState, k.MaxTotal, k.rules = l.Hold, l.Grace, l.Sessions, int64(l.State), int64(l.Total), l.Allow
	if tell {
		k.tellLimits(was)
	}
}

// tellLimits sends changed limits to every member. A larger limit holds at once. A smaller one holds after the member
// has agreed. An earlier commit must not be rejected, because the member has already read the committed bytes from
// its socket. A session larger than the new limit keeps the old one. k.mu is held.
func (k *Keeper) tellLimits(was int64) {
	k.changes++
	for _, s := range k.sessions {
		if s.size() > k.MaxState {
			s.allowed = max(s.allowed, was)
		}
	}
	for _, v := range k.services {
		for _, m := range v.members {
			m.limit = max(m.limit, k.MaxState)
			k.post(m, outgoing{message: wire.Message{Type: wire.Limits, Read: uint64(k.MaxState), Written: uint64(k.MaxSessions), Number: k.changes}})
		}
	}
}

// agreed applies the limits to a member after its answer to the latest change. It ignores answers to earlier changes.
func (k *Keeper) agreed(m *member, change uint32) {
	if change == k.changes {
		m.limit = k.MaxState
	}
}

// largest returns the maximum bytes of state and unread data for a member's session. It is at least the session's
// present size, because the session must remain transferable.
func (k *Keeper) largest(m *member, s *session) int64 {
	if wire.Elsewhere(m.name) { // agents of servers limit states themselves, and add data for moves
		return wire.MaxState
	}
	return max(m.limit, s.allowed, s.size(), s.weight())
}

// fetchable returns the maximum size of a state read from a memfd. update checks the limits.
func (k *Keeper) fetchable(m *member, id uint64) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.sessions[id]; s != nil && s.service == m.service {
		return k.largest(m, s)
	}
	return k.largest(m, &session{})
}
