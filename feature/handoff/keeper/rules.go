// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/users"
	svc "github.com/weir-project/weir/service"
)

// Rule makes some processes members of a service.
type Rule struct {
	Service string // "*": every service
	Kind    string // uid, gid, user, unit, cgroup, pidfile or pid
	Value   string
}

// Rules are alternatives.
type Rules []Rule

// ParseRule parses SERVICE:KIND=VALUE, like "telemetry:user=collector" or "telemetry:unit=nfacctd@0.service".
func ParseRule(s string) (Rule, error) {
	name, rest, ok := strings.Cut(s, ":")
	kind, value, ok2 := strings.Cut(rest, "=")
	r := Rule{name, kind, value}
	switch {
	case !ok || !ok2 || value == "":
		return r, fmt.Errorf("%q: want SERVICE:KIND=VALUE, like telemetry:user=collector", s)
	case name != "*" && !wire.ValidName(name):
		return r, fmt.Errorf("%q: invalid service name %q; * means every service", s, name)
	case !slices.Contains([]string{"uid", "gid", "user", "unit", "cgroup", "pidfile", "pid"}, kind):
		return r, fmt.Errorf("%q: want uid, gid, user, unit, cgroup, pidfile or pid, not %q", s, kind)
	}
	if kind == "uid" || kind == "gid" || kind == "pid" {
		if _, err := strconv.ParseUint(value, 10, 32); err != nil {
			return r, fmt.Errorf("%q: want a number for %s", s, kind)
		}
	}
	return r, nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rule) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRule(string(b))
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (r Rule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// String formats the rule for ParseRule.
func (r Rule) String() string { return r.Service + ":" + r.Kind + "=" + r.Value }

// Allow returns nil if a rule matches the process. Rules ignore member names, but members of different users stay
// isolated.
func (rs Rules) Allow(ctx context.Context, service, _ string, p Peer) error {
	for _, r := range rs {
		if (r.Service == service || r.Service == "*") && r.matches(ctx, p) {
			return nil
		}
	}
	return fmt.Errorf("process %d of user %d is no member of service %q: allow it with handoff.keeper.allow in weir.yaml, or weir handoff keep --allow: %s:uid=%d", p.PID, p.UID, service, service, p.UID)
}

// noUser returns the rules for users missing from /etc/passwd, the only source for a program without cgo. They match
// no process.
func (rs Rules) noUser() (out Rules) {
	for _, r := range rs {
		if r.Kind != "user" {
			continue
		}
		if _, err := users.Find(r.Value); err != nil {
			out = append(out, r)
		}
	}
	return out
}

func (r Rule) matches(ctx context.Context, p Peer) bool {
	switch r.Kind {
	case "uid":
		return r.Value == strconv.FormatUint(uint64(p.UID), 10)
	case "gid":
		return r.Value == strconv.FormatUint(uint64(p.GID), 10)
	}
	m := svc.Member{}
	switch r.Kind {
	case "user":
		m.User = r.Value
	case "unit":
		m.Unit = r.Value
	case "cgroup":
		m.Cgroup = r.Value
	case "pidfile":
		m.PIDFile = r.Value
	case "pid":
		m.PID, _ = strconv.Atoi(r.Value)
	}
	return matches(ctx, m, p)
}

// matches reports whether a process is a configured member.
func matches(ctx context.Context, m svc.Member, p Peer) bool {
	if m.User != "" {
		if u, err := user.Lookup(m.User); err == nil {
			return u.Uid == strconv.FormatUint(uint64(p.UID), 10)
		}
		return m.User == strconv.FormatUint(uint64(p.UID), 10)
	}
	pids, err := m.Processes(ctx)
	return err == nil && slices.Contains(pids, p.PID)
}
