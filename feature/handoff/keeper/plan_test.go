// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// TestPlanWarnsOfShorterHold checks the plan's warning: a shorter hold ends waiting sessions.
func TestPlanWarnsOfShorterHold(t *testing.T) {
	have := State{Limits: &Limits{Hold: time.Minute}}
	p, err := Feature{}.Plan(t.Context(), have, Limits{Hold: 10 * time.Second})
	if err != nil || len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "handoff.keeper.hold 1m0s → 10s") {
		t.Errorf("shorter: %q, %v", p.Warnings, err)
	}
	if p, err = (Feature{}).Plan(t.Context(), have, Limits{}); err != nil || len(p.Warnings) != 1 {
		t.Errorf("the section is gone, and with it a minute: %q, %v", p.Warnings, err)
	}
	if p, err = (Feature{}).Plan(t.Context(), State{}, Limits{Hold: time.Minute}); err != nil || len(p.Warnings) != 0 {
		t.Errorf("longer: %q, %v", p.Warnings, err)
	}
}

// TestPlanWarnsOfLowerState checks the plan's warning about a lower state limit.
func TestPlanWarnsOfLowerState(t *testing.T) {
	have := State{Limits: &Limits{State: 2 << 20}}
	p, err := Feature{}.Plan(t.Context(), have, Limits{State: 1 << 19})
	if err != nil || len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "handoff.keeper.max_state 2MiB → 512KiB") {
		t.Errorf("lower: %q, %v", p.Warnings, err)
	}
	if p, err = (Feature{}).Plan(t.Context(), have, Limits{State: 3 << 20}); err != nil || len(p.Warnings) != 0 {
		t.Errorf("higher: %q, %v", p.Warnings, err)
	}
}

// TestPlanOfRules checks that changed rules are a change of the limits, and are pinned.
func TestPlanOfRules(t *testing.T) {
	limits := func(value string) Limits { return Limits{Allow: Rules{{"telemetry", "user", value}}} }
	for _, c := range []struct {
		have *Limits
		want Limits
		verb string
	}{
		{nil, limits("collector"), "create"},
		{new(limits("collector")), limits("collector"), ""},
		{new(limits("collector")), limits("other"), "change"},
		{new(limits("collector")), Limits{}, "remove"},
	} {
		have := State{}
		if c.have != nil {
			text, err := json.Marshal(c.have)
			have.Limits = &Limits{}
			if err == nil {
				err = json.Unmarshal(text, have.Limits)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		p, err := Feature{}.Plan(t.Context(), have, c.want)
		if err != nil || (c.verb == "") != (len(p.Steps) == 0) || c.verb != "" && p.Steps[0].Verb != c.verb {
			t.Errorf("%v to %v: %v, %v; want %q", c.have, c.want, p.Steps, err, c.verb)
		} else if c.verb == "create" && !strings.Contains(p.Steps[0].Detail, "allow telemetry:user=collector") {
			t.Errorf("the plan says %q", p.Steps[0].Detail)
		}
	}
}

// TestRuleOfNoUser checks the warnings about a rule for a missing user, in the plan and, once, in the keeper's log.
func TestRuleOfNoUser(t *testing.T) {
	want := Limits{Allow: Rules{{"bmp", "user", "nosuchuser"}, {"bmp", "user", "0"}, {"bmp", "uid", "4711"}}}
	p, err := Feature{}.Plan(t.Context(), State{}, want)
	if err != nil || len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "handoff.keeper.allow: bmp:user=nosuchuser: /etc/passwd has no such user") {
		t.Errorf("%q, %v", p.Warnings, err)
	}
	var log nstest.Log
	k := New(Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	for range 2 {
		k.Limit(want)
	}
	if n := strings.Count(log.String(), "no such user"); n != 1 || !log.Has("bmp:user=nosuchuser") {
		t.Errorf("the log says so %d times: %s", n, log.String())
	}
}
