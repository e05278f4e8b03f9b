// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"strings"

	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// Spec is the part of a service common to all features: its traffic and its members.
type Spec struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string   `yaml:"-" json:"name"`
	Listen         []Listen `yaml:"listen" json:"listen"`
	Netns          string   `yaml:"netns" json:"netns,omitempty"` // name, path or "pid:N"; "": see FindNetns
	Members        []Member `yaml:"members" json:"members,omitempty"`
}

// Member names the process that serves a slot. Exactly one of PID, PIDFile, Unit, Cgroup and User is set.
type Member struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Slot           int             `yaml:"slot" json:"slot"`
	PID            int             `yaml:"pid" json:"pid,omitempty"`
	PIDFile        string          `yaml:"pidfile" json:"pidfile,omitempty" path:"file"`
	Unit           string          `yaml:"unit" json:"unit,omitempty"`     // systemd unit
	Cgroup         string          `yaml:"cgroup" json:"cgroup,omitempty"` // of version 2, relative to its root
	User           string          `yaml:"user" json:"user,omitempty"`     // processes of this user may register themselves (package register)
	Bound          []Listen        `yaml:"bound" json:"bound,omitempty"`   // bound addresses of its sockets, one per listen; default: the listen
	Keep           bool            `yaml:"keep" json:"keep,omitempty"`     // its sockets outlive it: it is withdrawn when they close, not when it exits
	Group          bool            `yaml:"-" json:"-"`                     // a socket may represent its reuseport group
	Not            map[uint64]bool `yaml:"-" json:"-"`                     // cookies of other members' sockets: not adopted
	Ready          *Ready          `yaml:"ready" json:"ready,omitempty"`   // check before admission; nil: its sockets suffice
}

// String names the member as in status and plans.
func (m Member) String() string {
	switch {
	case m.PID != 0:
		return fmt.Sprintf("pid %d", m.PID)
	case m.PIDFile != "":
		return "pidfile " + m.PIDFile
	case m.Unit != "":
		return "unit " + m.Unit
	case m.Cgroup != "":
		return "cgroup " + m.Cgroup
	case m.User != "":
		return "user " + m.User
	}
	return "none"
}

// Elsewhere returns the member's bound addresses where the kernel alone would not deliver the service's packets.
func (s Spec) Elsewhere(m Member) (out []Listen) {
	for i, b := range m.Bound {
		if i < len(s.Listen) && !b.covers(s.Listen[i]) {
			out = append(out, b)
		}
	}
	return out
}

// Endpoints returns the endpoints of all listens in order: a slot needs a socket for each.
func (s Spec) Endpoints() []Endpoint {
	var out []Endpoint
	for i, l := range s.Listen {
		out = append(out, l.Endpoints(i)...)
	}
	return out
}

// Member returns the member of a slot, or nil.
func (s Spec) Member(slot int) *Member {
	for i := range s.Members {
		if s.Members[i].Slot == slot {
			return &s.Members[i]
		}
	}
	return nil
}

// CheckName checks the name of the service. The error has its position in the file.
func (s Spec) CheckName() error {
	if kernel.ValidName(s.Name) {
		return nil
	}
	return s.Pos.Errorf("services.%s: %q is not a valid service name: use 1 to 63 letters, digits, - and _", s.Name, s.Name)
}

// Validate checks the spec beyond its types and its name. slots is the number of slots, 0 if the file has a wrong one.
// Errors have positions in the file.
func (s Spec) Validate(slots int) []error {
	var errs []error
	fail := func(p strictyaml.Pos, format string, a ...any) {
		errs = append(errs, p.Errorf("services.%s: "+format, append([]any{s.Name}, a...)...))
	}
	if len(s.Listen) == 0 {
		fail(s.Pos, `no listen: name its traffic, like listen: [udp 0.0.0.0:4739]`)
	}
	eps := s.Endpoints()
	for i, e := range eps {
		for _, o := range eps[:i] {
			if e.Overlaps(o) {
				fail(s.Pos, "%q and %q cover the same packets: remove one", s.Listen[o.Listen], s.Listen[e.Listen])
			}
		}
	}
	owners := map[int]Member{}
	for _, m := range s.Members {
		if first, ok := owners[m.Slot]; ok {
			fail(m.Pos, "two members in slot %d: %s here and %s in line %d; a slot has one member, give each its own", m.Slot, m, first, first.Pos.Line)
		}
		owners[m.Slot] = m
		switch {
		case m.Slot >= 0 && (m.Slot < slots || slots == 0):
		case slots == 1:
			fail(m.Pos, "slot %d: the service has one slot, number 0", m.Slot)
		default:
			fail(m.Pos, "slot %d: the service has %d slots, numbered 0 to %d", m.Slot, slots, slots-1)
		}
		if err := m.validate(s.Listen); err != nil {
			fail(m.Pos, "slot %d: %v", m.Slot, err)
		}
	}
	return errs
}

// validate checks a member of a service with these listens.
func (m Member) validate(listens []Listen) error {
	var named []string
	for _, f := range []struct {
		key string
		set bool
	}{{"pid", m.PID != 0}, {"pidfile", m.PIDFile != ""}, {"unit", m.Unit != ""}, {"cgroup", m.Cgroup != ""}, {"user", m.User != ""}} {
		if f.set {
			named = append(named, f.key)
		}
	}
	switch {
	case len(named) == 0:
		return fmt.Errorf("no process named: give one of pid, pidfile, unit, cgroup, user")
	case len(named) > 1:
		return fmt.Errorf("%s name the process more than once: keep one", strings.Join(named, " and "))
	case m.PID < 0:
		return fmt.Errorf("pid %d: want a positive number", m.PID)
	case len(m.Bound) != 0 && len(m.Bound) != len(listens):
		return fmt.Errorf("bound has %s and the service %s: give one for each, in their order", printable.Count(len(m.Bound), "entry"), printable.Count(len(listens), "listen"))
	}
	for i, b := range m.Bound {
		if b.Proto != listens[i].Proto {
			return fmt.Errorf("bound %q is for listen %q of another protocol: give them in the order of the listens", b, listens[i])
		}
	}
	if m.Ready != nil {
		return m.Ready.validate()
	}
	return nil
}
