// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/mover"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
)

// features are weir's features. A new feature needs one line here and its command file in cmd/weir. Its optional
// interfaces (run, recover, upgrade, examine, measure) are found by type assertion.
var features = []feature.Declared{
	feature.Declare(steer.Feature{}),
	feature.Declare(guard.Feature{}),
	feature.Declare(filter.Feature{}),
	feature.Declare[keeper.Limits, keeper.State](sessions{}),
	feature.Declare(reroute.Feature{}),
	feature.Declare(lb.Feature{}),
	feature.Declare(backend.Feature{}),
}

// Add adds a feature, for programs with weir as a library and their own features. Call it before everything else.
func Add(f feature.Declared) { features = append(features, f) }

// sessions is the keeper, with a mover of its sessions for steering.
type sessions struct{ keeper.Feature }

// bufferLimit is longer in tests, because test machines may stall. 0: the default.
var bufferLimit time.Duration

// SessionMover implements feature.MoverProvider.
func (sessions) SessionMover(socket string) feature.SessionMover {
	return mover.Mover{Socket: socket, Limit: bufferLimit}
}

// named returns the feature with a name, or all features if name is empty.
func named(name string) ([]feature.Declared, error) {
	for i, f := range features {
		if f.Name == name {
			return features[i : i+1], nil
		}
	}
	if name == "" {
		return features, nil
	}
	return nil, fmt.Errorf("no feature %q: want one of %s", name, strings.Join(Features(), ", "))
}

// Features returns the names of weir's features.
func Features() []string {
	var out []string
	for _, f := range features {
		out = append(out, f.Name)
	}
	return out
}

// SetVersion sets the version recorded in published instances.
func SetVersion(v string) {
	kernel.Version = v
}
