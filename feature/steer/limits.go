// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
)

// room is what one engine of a namespace has to hold.
type room struct{ services, rows int }

// checkLimits refuses what an engine cannot hold before anything changes. Services come and change in the order of the
// file, and go at the end: what counts is the most at any time.
func checkLimits(have state.State, want []target) error {
	type engineOf struct {
		scope string
		kind  spec.Engine
	}
	used := map[engineOf]room{}
	before := map[string]*record.Service{}
	for i := range have.Services {
		s := &have.Services[i]
		at := engineOf{s.PinScope, s.Engine}
		used[at] = room{used[at].services + 1, used[at].rows + len(s.Record.Rows) + len(s.Record.Spare)}
		before[s.PinScope+"/"+s.Name] = s.Record
	}
	for _, t := range want {
		was := before[t.scope+"/"+t.service.Name]
		kind, _, err := record.ChooseEngine(t.service, was)
		if err != nil {
			return fmt.Errorf("services.%s: %w", t.service.Name, err)
		}
		at := engineOf{t.scope, kind}
		now, rows, freed := used[at], t.service.Rows(), 0
		switch {
		case was == nil || was.Engine != kind:
			now.services++
		case slices.Equal(was.Service.Endpoints(), t.service.Endpoints()):
			kept := len(was.Rows) + len(was.Spare)
			rows, freed = max(rows-kept, 0), max(kept-rows, 0)
		default: // both are there until the new one is in force
			freed = len(was.Rows) + len(was.Spare)
		}
		now.rows += rows
		if now.services > spec.MaxServices {
			return t.service.Spec.Pos.Errorf("services.%s is one too many: engine %s takes %d services in one network namespace (%s), counting those that go with this change: merge some, or take some away first", t.service.Name, kind, spec.MaxServices, t.netns)
		}
		if now.rows > spec.MaxRows {
			return t.service.Spec.Pos.Errorf("services.%s: its slots are too many: engine %s takes %d slots in one network namespace (%s), counting those that go with this change: lower slots, or take services away first", t.service.Name, kind, spec.MaxRows, t.netns)
		}
		now.rows -= freed
		used[at] = now
		if was != nil && was.Engine != kind {
			old := engineOf{t.scope, was.Engine}
			used[old] = room{used[old].services - 1, used[old].rows - len(was.Rows) - len(was.Spare)}
		}
	}
	return nil
}
