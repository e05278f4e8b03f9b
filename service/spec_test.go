// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/strictyaml"
)

// spec returns a service with positions: the service in line 10, its members from line 21.
func spec(t testing.TB, listens []string, members ...Member) Spec {
	t.Helper()
	s := Spec{Pos: strictyaml.Pos{File: "weir.yaml", Line: 10, Column: 5}, Name: "telemetry", Members: members}
	for _, l := range listens {
		s.Listen = append(s.Listen, parse(t, l))
	}
	for i := range s.Members {
		s.Members[i].Pos = strictyaml.Pos{File: "weir.yaml", Line: 21 + i, Column: 9}
	}
	return s
}

func bound(t testing.TB, m Member, listens ...string) Member {
	t.Helper()
	for _, l := range listens {
		m.Bound = append(m.Bound, parse(t, l))
	}
	return m
}

func TestValidate(t *testing.T) {
	both := []string{"udp 0.0.0.0:4739", "tcp 0.0.0.0:1790"}
	for name, c := range map[string]struct {
		spec  Spec
		slots int
		want  []string // one error each; none: valid
	}{
		"good": {spec(t, both, Member{Slot: 0, PID: 1}, Member{Slot: 3, Unit: "a.service"},
			Member{Slot: 1, Cgroup: "/c"}, bound(t, Member{Slot: 2, PIDFile: "/p"}, "udp :1", "tcp :1")), 4, nil},
		"no members":  {spec(t, both), 1, nil},
		"no listen":   {spec(t, nil), 1, []string{"weir.yaml:10:5: services.telemetry: no listen: name its traffic"}},
		"same twice":  {spec(t, []string{"udp :1", "udp :1"}), 1, []string{`10:5: services.telemetry: "udp :1" and "udp :1" cover the same packets`, `cover the same packets`}},
		"one family":  {spec(t, []string{"udp :1", "udp6 :1"}), 1, []string{`"udp :1" and "udp6 :1" cover the same packets: remove one`}},
		"no overlap":  {spec(t, []string{"udp 192.0.2.0/24:1", "udp :1", "tcp :1", "udp :2"}), 1, nil},
		"same slot":   {spec(t, both, Member{Slot: 1, PID: 1}, Member{Slot: 1, PID: 2}), 4, []string{"weir.yaml:22:9: services.telemetry: two members in slot 1: pid 2 here and pid 1 in line 21"}},
		"three":       {spec(t, both, Member{PID: 1}, Member{PID: 2}, Member{PID: 3}), 4, []string{"22:9: ", "23:9: services.telemetry: two members in slot 0: pid 3 here and pid 2 in line 22"}},
		"beyond":      {spec(t, both, Member{Slot: 4, PID: 1}), 4, []string{"weir.yaml:21:9: services.telemetry: slot 4: the service has 4 slots, numbered 0 to 3"}},
		"negative":    {spec(t, both, Member{Slot: -1, PID: 1}), 4, []string{"21:9: services.telemetry: slot -1: the service has"}},
		"nobody":      {spec(t, both, Member{Slot: 2}), 4, []string{"21:9: services.telemetry: slot 2: no process named: give one of pid, pidfile, unit, cgroup, user"}},
		"twice named": {spec(t, both, Member{PID: 1, Unit: "u", Cgroup: "c"}), 4, []string{"21:9: services.telemetry: slot 0: pid and unit and cgroup name the process more than once: keep one"}},
		"bad pid":     {spec(t, both, Member{PID: -4}), 4, []string{"21:9: services.telemetry: slot 0: pid -4: want a positive number"}},
		"bound":       {spec(t, both, bound(t, Member{PID: 1}, "udp :1")), 4, []string{"slot 0: bound has 1 entry and the service 2 listens"}},
		"bound order": {spec(t, both, bound(t, Member{PID: 1}, "tcp :1", "udp :1")), 4, []string{`slot 0: bound "tcp :1" is for listen "udp 0.0.0.0:4739"`}},
		"several":     {spec(t, nil, Member{Slot: 9}), 4, []string{"10:5: ", "21:9: services.telemetry: slot 9: the service has", "21:9: services.telemetry: slot 9: no process"}},
	} {
		errs := c.spec.Validate(c.slots)
		if len(errs) != len(c.want) {
			t.Errorf("%s: %d errors, want %d: %v", name, len(errs), len(c.want), errors.Join(errs...))
			continue
		}
		for i, want := range c.want {
			if !strings.Contains(errs[i].Error(), want) {
				t.Errorf("%s: %v\nwant it to say %q", name, errs[i], want)
			}
		}
	}
}

func TestValidateNames(t *testing.T) {
	for name, ok := range map[string]bool{"a": true, "a-B_9": true, strings.Repeat("x", 63): true,
		"": false, "@engine": false, "a.b": false, "a b": false, "../x": false, strings.Repeat("x", 64): false} {
		s := spec(t, []string{"udp :1"})
		s.Name = name
		if err := s.CheckName(); (err == nil) != ok || !ok && !strings.Contains(err.Error(), "is not a valid service name") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestMember(t *testing.T) {
	s := spec(t, []string{"udp :1"}, Member{Slot: 2, PID: 7}, Member{Slot: 0, PIDFile: "/run/x.pid"}, Member{Slot: 1, Unit: "u@1"}, Member{Slot: 3, Cgroup: "/c/1"})
	for slot, want := range []string{"pidfile /run/x.pid", "unit u@1", "pid 7", "cgroup /c/1"} {
		if m := s.Member(slot); m == nil || m.String() != want || m.Slot != slot {
			t.Errorf("slot %d has %v, want %s", slot, m, want)
		}
	}
	if m := s.Member(4); m != nil {
		t.Errorf("slot 4 has %v", m)
	}
	if s := (Member{}).String(); s != "none" {
		t.Errorf("nobody is called %q", s)
	}
}

func TestSpecEndpoints(t *testing.T) {
	s := spec(t, []string{"udp 192.0.2.1:1", "tcp :2"})
	var got []string
	for _, e := range s.Endpoints() {
		got = append(got, e.String())
	}
	if g := strings.Join(got, ", "); g != "udp 192.0.2.1:1, tcp4 :2, tcp6 :2" {
		t.Errorf("endpoints %s", g)
	}
	if l := s.Endpoints()[2].Listen; l != 1 {
		t.Errorf("the last endpoint is of listen %d", l)
	}
}

// A member bound to its service's addresses, or to all addresses, is reachable without weir.
func TestElsewhere(t *testing.T) {
	for _, c := range []struct {
		listen, bound string
		elsewhere     bool
	}{
		{"udp 10.9.0.0/24:53", "udp 0.0.0.0:53", false},
		{"udp 10.9.0.0/24:53", "udp 10.9.0.0/16:53", false},
		{"udp 10.9.0.1:53", "udp [::]:53", false},
		{"udp :53", "udp [::]:53", false},
		{"udp6 :53", "udp [::]:53", false},
		{"udp 10.9.0.0/24:53", "udp 0.0.0.0:5353", true},
		{"udp 10.9.0.0/24:53", "udp 10.9.0.1:53", true},
		{"udp 10.9.0.0/24:53", "udp 127.0.0.1:53", true},
		{"udp :53", "udp 0.0.0.0:53", true},
		{"udp 10.9.0.0/24:53", "udp6 [::]:53", true},
	} {
		s := Spec{Listen: []Listen{parse(t, c.listen)}}
		if got := s.Elsewhere(Member{Bound: []Listen{parse(t, c.bound)}}); (len(got) > 0) != c.elsewhere {
			t.Errorf("listen %s, bound %s: elsewhere %v", c.listen, c.bound, got)
		}
		if got := s.Elsewhere(Member{}); len(got) != 0 {
			t.Errorf("listen %s, not bound: elsewhere %v", c.listen, got)
		}
	}
}
