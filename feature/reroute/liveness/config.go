// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/reroute/links"
)

// Mode is the role of a session.
type Mode string

// Modes.
const (
	Active  Mode = "active"  // probes the peer, and is probed
	Sender  Mode = "sender"  // probes only; the peer's weir judges too
	Passive Mode = "passive" // is probed only, and judges by the probes
	Echo    Mode = "echo"    // probes a plain router: its End segment
)

// Session is one probed link.
type Session struct {
	Name   string `json:"name"`
	ID     uint32 `json:"id"` // on the wire, the same at both ends; from 1
	Mode   Mode   `json:"mode"`
	Device string `json:"device"` // of the link: probes leave and count by this device only
	// Peer is the segment of the peer's function. In mode echo it is the peer's End segment. Not for passive.
	Peer netip.Addr `json:"peer,omitzero"`
	// Via is the next hop on the device, link-local or global; zero: Peer.
	Via netip.Addr `json:"via,omitzero"`
	// Source is the destination of answers. The peer must route it over this link. The device's own address is best.
	Source netip.Addr `json:"source,omitzero"`
	// Function is the segment answering the peer's probes. Not for sender and echo.
	Function   netip.Addr    `json:"function,omitzero"`
	Interval   time.Duration `json:"interval"`             // 1 ms to 60 s
	Multiplier int           `json:"multiplier"`           // number of unanswered probes for a failure, 3 to 50
	Grace      time.Duration `json:"grace,omitempty"`      // minimum wait for an answer; 0: three tenths of an interval
	StableFor  time.Duration `json:"stable_for,omitempty"` // time without failure before up; 0: 20 intervals, at least 200 ms
	StableMax  time.Duration `json:"stable_max,omitempty"` // upper bound of StableFor after flaps, which double it; 0: 30 s
	KeyFile    string        `json:"key_file"`             // 16 random bytes, or 32 hexadecimal digits; the same at both ends
	Observe    bool          `json:"observe,omitempty"`    // judge without informing the data path
}

// Config is the liveness of the links of one network namespace.
type Config struct {
	Netns    string    `json:"netns,omitempty"` // as for netns.Open; "": the caller's
	Sessions []Session `json:"sessions"`
	// CPUs lists the CPUs with a timer loop. Session n uses the loops n and n+1, modulo their number. nil: all CPUs,
	// at most 16.
	CPUs []int `json:"cpus,omitempty"`
	// Tick is an upper bound of the tick, even without sessions, because other packages (bfd/engine) attach programs
	// to the loops. 0: as the sessions need.
	Tick time.Duration `json:"tick,omitempty"`
}

// maxSessions is the limit of sessions in a network namespace.
const maxSessions = 1024

const (
	maxLoops      = 16
	minInterval   = time.Millisecond
	maxInterval   = time.Minute
	minMultiplier = 3
	maxMultiplier = 50
)

func (s Session) sends() bool  { return s.Mode != Passive }
func (s Session) judges() bool { return s.Mode == Active || s.Mode == Passive }

// filled returns the session with defaults in place of zeros.
func (s Session) filled() Session {
	if s.Mode == "" {
		s.Mode = Active
	}
	if s.sends() && !s.Via.IsValid() {
		s.Via = s.Peer
	}
	if s.Grace == 0 {
		s.Grace = s.Interval * 3 / 10
	}
	if s.StableFor == 0 {
		s.StableFor = max(20*s.Interval, 200*time.Millisecond)
	}
	if s.StableMax == 0 {
		s.StableMax = max(30*time.Second, s.StableFor)
	}
	return s
}

// wanted reports whether the namespace needs an instance.
func (c Config) wanted() bool { return len(c.Sessions) > 0 || c.Tick != 0 }

// Validate returns all errors, each with its position and a remedy.
func (c Config) Validate() []error {
	var errs []error
	if len(c.Sessions) > maxSessions {
		errs = append(errs, fmt.Errorf("%d sessions: a network namespace can have %d", len(c.Sessions), maxSessions))
	}
	if len(c.CPUs) > maxLoops {
		errs = append(errs, fmt.Errorf("cpus: %d of them: a tick source has at most %d loops", len(c.CPUs), maxLoops))
	}
	if c.Tick != 0 && (c.Tick < minTick || c.Tick > maxTick) {
		errs = append(errs, fmt.Errorf("tick %s: use %s to %s", c.Tick, minTick, maxTick))
	}
	names, ids, tellers := map[string]bool{}, map[uint32]string{}, map[string]string{}
	for i, s := range c.Sessions {
		s = s.filled()
		at := func(format string, a ...any) {
			errs = append(errs, fmt.Errorf("session %q (number %d): %w", s.Name, i+1, fmt.Errorf(format, a...)))
		}
		if err := s.check(); err != nil {
			at("%w", err)
		}
		if names[s.Name] {
			at("another session has this name: names are unique")
		}
		names[s.Name] = true
		if o, taken := ids[s.ID]; taken {
			at("id: session %q has %d too: each session needs its own, the same at both ends of its link", o, s.ID)
		}
		ids[s.ID] = s.Name
		if o, taken := tellers[s.Device]; taken && !s.Observe {
			at("session %q judges device %s already: set observe: true for all but one", o, s.Device)
		} else if !s.Observe {
			tellers[s.Device] = s.Name
		}
	}
	return errs
}

// check validates a filled session on its own.
func (s Session) check() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	global := func(field string, a netip.Addr, what string) {
		if !a.Is6() || a.Is4In6() || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() || a.IsLoopback() || a.Zone() != "" {
			bad("%s: %q is not a global IPv6 address: it is %s", field, a, what)
		}
	}
	if s.Name == "" {
		bad("name: missing")
	}
	if s.ID == 0 {
		bad("id: 0 is not allowed: use a number from 1, the same at both ends")
	}
	if s.Device == "" {
		bad("device: name the interface of the link")
	}
	switch s.Mode {
	case Active, Sender, Passive, Echo:
	default:
		bad("mode: %q: use active, sender, passive or echo", s.Mode)
	}
	if s.sends() {
		global("peer", s.Peer, "the peer's answering segment")
		global("source", s.Source, "the destination of the peer's answers, over this link")
		if !s.Via.Is6() || s.Via.Is4In6() || s.Via.IsMulticast() || s.Via.Zone() != "" {
			bad("via: %q is no IPv6 next hop (without a zone: the device is named already)", s.Via)
		}
	}
	if s.judges() {
		global("function", s.Function, "this router's answering segment")
	}
	if s.sends() && s.judges() && s.Peer == s.Function {
		bad("function: %s is the peer's segment too: each router needs its own", s.Function)
	}
	if s.sends() && s.Via == s.Source {
		bad("via: %s is this router's own address (source): use the peer's on the link", s.Via)
	}
	if s.Interval < minInterval || s.Interval > maxInterval {
		bad("interval: %s: use %s to %s", s.Interval, minInterval, maxInterval)
	}
	if s.Multiplier < minMultiplier || s.Multiplier > maxMultiplier {
		bad("multiplier: %d: use %d to %d", s.Multiplier, minMultiplier, maxMultiplier)
	}
	if s.Grace < 0 || s.Grace > maxInterval {
		bad("grace: %s: use up to %s", s.Grace, maxInterval)
	}
	if s.StableFor < 0 || s.StableMax < s.StableFor {
		bad("stable_max: %s is less than stable_for, %s", s.StableMax, s.StableFor)
	}
	if s.KeyFile == "" {
		bad("key_file: probes are signed: make a key with head -c 16 /dev/urandom, and give it to both ends")
	}
	return errors.Join(errs...)
}

// slots rejects two devices with the same slot of the link states.
func slots(devices map[string]int) error {
	taken := map[uint32]string{}
	for name, index := range devices {
		if o, ok := taken[links.Slot(index)]; ok {
			return fmt.Errorf("devices %s and %s: their indexes differ by a multiple of %d, so only one of them can be protected: recreate one of them, or set observe: true", o, name, links.Slots)
		}
		taken[links.Slot(index)] = name
	}
	return nil
}
