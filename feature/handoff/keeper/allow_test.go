// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/kernel"
	svc "github.com/weir-project/weir/service"
)

// TestAllowBesideSlots checks that a rule allows processes besides the members of slots, but never under the number
// of a slot with a member.
func TestAllowBesideSlots(t *testing.T) {
	unreadable := errors.New("unreadable")
	s := &socket{members: func(service string) ([]svc.Member, error) {
		switch service {
		case "telemetry":
			return []svc.Member{{Slot: 0, User: "4242"}, {Slot: 1, User: "4343"}}, nil
		case "damaged":
			return nil, unreadable
		}
		return nil, fmt.Errorf("no service %s: %w", service, kernel.ErrNotExist)
	}}
	s.Keeper = New(Options{Allow: s.allow})
	s.Limit(Limits{Allow: Rules{{"*", "uid", "4343"}, {"*", "uid", "4444"}}})
	for _, c := range []struct {
		service, name string
		uid           uint32
		want          string // part of the error; empty: allowed
	}{
		{"telemetry", "0", 4242, ""},
		{"telemetry", "spare", 4242, ""},
		{"telemetry", "1", 4242, "is the member of slot 0"},
		{"telemetry", "0", 4343, "is the member of slot 1"},
		{"telemetry", "spare", 4444, ""},
		{"telemetry", "2", 4444, ""}, // a slot without a member
		{"telemetry", "0", 4444, "in slot 0"},
		{"telemetry", "spare", 4545, "is no member of service"},
		{"other", "0", 4444, ""},
		{"other", "0", 4545, "no service other"},
		{"damaged", "spare", 4444, "unreadable"},
	} {
		err := s.Keeper.allow(t.Context(), c.service, c.name, Peer{PID: 1, UID: c.uid})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("user %d as %s of %s: %v; want %q", c.uid, c.name, c.service, err, c.want)
		}
	}
}
