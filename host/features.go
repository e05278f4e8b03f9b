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

// features are all of weir's. One more is one more line here, and its command file in cmd/weir; what it can do beside the common
// (run, recover, upgrade, examine, measure) is found by type assertion.
var features = []feature.Declared{
	feature.Declare(steer.Feature{}),
	feature.Declare(guard.Feature{}),
	feature.Declare(filter.Feature{}),
	feature.Declare[keeper.Limits, keeper.State](sessions{}),
	feature.Declare(reroute.Feature{}),
	feature.Declare(lb.Feature{}),
	feature.Declare(backend.Feature{}),
}

// Add adds a feature to the list, for programs with weir as a library and features of their own. Call it before everything else.
func Add(f feature.Declared) { features = append(features, f) }

// sessions is the keeper, with steer's way to its sessions.
type sessions struct{ keeper.Feature }

// bufferLimit is for tests, whose machines stand still for longer. 0: the default.
var bufferLimit time.Duration

// SessionMover implements feature.MoverProvider.
func (sessions) SessionMover(socket string) feature.SessionMover {
	return mover.Mover{Socket: socket, Limit: bufferLimit}
}

// named are the features that a command is about: all of them if name is empty.
func named(name string) ([]feature.Declared, error) {
	for i, f := range features {
		if f.Name == name {
			return features[i : i+1], nil
		}
	}
	if name == "" {
		return features, nil
	}
	return nil, fmt.Errorf("no feature %q: there is %s", name, strings.Join(Features(), ", "))
}

// Features are the names of weir's features.
func Features() []string {
	var out []string
	for _, f := range features {
		out = append(out, f.Name)
	}
	return out
}

// SetVersion has every instance that is published record this version of weir.
func SetVersion(v string) {
	kernel.Version = v
}
