// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net/netip"
	"os/user"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/inventory"
)

// suggesting is a feature unknown to host and cmd, with suggestions.
type suggesting struct {
	featuretest.Feature
	all []feature.Suggestion
}

// Suggest implements feature.Suggester.
func (s suggesting) Suggest(inventory.Host) []feature.Suggestion { return s.all }

func addSuggesting(t *testing.T, all ...feature.Suggestion) {
	before := features
	features = append(slices.Clip(features), feature.Declare[[]featuretest.Item, feature.SetState[featuretest.Item, featuretest.View]](suggesting{featuretest.New(), all}))
	t.Cleanup(func() { features = before })
}

func wantDraft(t *testing.T, d Draft, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(string(d.Text), part) {
			t.Errorf("%q is missing from\n%s", part, d.Text)
		}
	}
}

// A feature adds its suggestions by the interface alone.
func TestDraftOfFeature(t *testing.T) {
	addSuggesting(t, feature.Suggestion{Text: "skeleton:\n  - {name: web, cgroup: /a}\n", Reason: []string{"It counts packets."}, Active: true})
	d, err := newWorld(t).draft(t.Context(), inventory.Host{})
	if err != nil || len(d.LeftOut) > 0 {
		t.Fatalf("%v, left out: %q", err, d.LeftOut)
	}
	wantDraft(t, d, "\n# It counts packets.\nskeleton:\n  - {name: web, cgroup: /a}\n", "\n#services:\n  # An example: ")
}

// A suggestion rejected by weir apply is commented out, with the reason. The others stay.
func TestDraftLeavesOut(t *testing.T) {
	server := inventory.Program{Name: "game", Service: "game", Role: inventory.Other, Instances: []inventory.Instance{{PID: 7, Unit: "game.service"}},
		Listens: []inventory.Listen{{Proto: "udp", Local: netip.MustParseAddrPort("0.0.0.0:27015")}}}
	addSuggesting(t,
		feature.Suggestion{Service: "game", Text: "guard: {limit: 1kpps}\n", Active: true},
		feature.Suggestion{Service: "game", Text: "steer: {slots: 1000}\n", Active: true},
		feature.Suggestion{Text: "reroute: none\n"},
	)
	d, err := newWorld(t).draft(t.Context(), inventory.Host{Programs: []inventory.Program{server}, Unseen: []string{"the other half\n"}})
	if err != nil {
		t.Fatal(err)
	}
	wantDraft(t, d, "\nservices:\n  # game, server: unit game.service; listens at udp 0.0.0.0:27015\n  game:\n    listen:\n      - udp 0.0.0.0:27015\n",
		"\n    guard: {limit: 1kpps}\n", "\n    # Not in force, weir apply rejects it now: ", "\n    #steer: {slots: 1000}\n", "\n#reroute: none\n", `# Not seen: the other half\n`)
	if len(d.LeftOut) != 1 || !strings.Contains(d.LeftOut[0], "slots 1000: want a number") {
		t.Errorf("left out: %q", d.LeftOut)
	}
}

func TestIdentify(t *testing.T) {
	const id = "4f2a9c0d1e5b6a7788990011223344556677889900aabbccddeeff0011223344"
	for path, want := range map[string][2]string{
		"/system.slice/nginx.service":                                    {"nginx.service", ""},
		"/user.slice/user-1000.slice/user@1000.service/app/game.service": {"", ""},
		"/system.slice/docker-" + id + ".scope":                          {"", "docker 4f2a9c0d1e5b"},
		"/":                                                              {"", ""},
	} {
		if unit, container := identify(path); [2]string{unit, container} != want {
			t.Errorf("%s: got %q, %q; want %q", path, unit, container, want)
		}
	}
}

// The key group names the group of weir. On a host without it, the file says how others get access.
func TestGroupKey(t *testing.T) {
	for want, lookup := range map[string]func(string) (*user.Group, error){
		"group: weir # may read the state of weir": func(string) (*user.Group, error) { return &user.Group{}, nil },
		"group: root # only root reads the state of weir; for others: groupadd --system weir, and group: weir": func(name string) (*user.Group, error) {
			return nil, user.UnknownGroupError(name)
		},
	} {
		if got := groupKey(lookup); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
