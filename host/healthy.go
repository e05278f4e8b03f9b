// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// health is what /healthz and weir_healthy go by: damage, instances that cannot be read, failures of features, and a file that is not in
// force. All of it weir doctor calls a failure. It costs what weir status costs without the agents' answers.
type health struct {
	host *Host
	file *file // of weir serve; nil: none
	port *metricsPort
}

// bootTime is for how long after the host's boot failures of features do not count: interfaces, addresses and neighbours come meanwhile, and
// weir serve attaches as they do. Damage counts at once. Tests change it.
var bootTime = 2 * time.Minute

// confirmAfter is after how long a failure is looked for again: a command that changes the instance right now has not attached it yet.
const confirmAfter = 250 * time.Millisecond

// check returns the faults, and the reasons why not everything works; nil: it does.
func (h health) check(ctx context.Context) ([]kernel.Fault, error) {
	faults, err := h.host.Faults(ctx)
	errs := []error{damage(faults), err}
	failures, unread := h.host.failing(ctx, nil, errs[0] != nil)
	if errs = append(errs, unread); len(failures) > 0 && time.Duration(kernel.Monotonic()) > bootTime {
		errs = append(errs, h.lasting(ctx, failures, errs[0] != nil)...)
	}
	return faults, errors.Join(append(errs, h.file.failure(), h.port.failure())...)
}

// lasting are the failures that are there still after a moment.
func (h health) lasting(ctx context.Context, failures []Finding, damaged bool) (errs []error) {
	select {
	case <-ctx.Done():
	case <-time.After(confirmAfter):
	}
	now, _ := h.host.failing(ctx, nil, damaged)
	for _, f := range failures {
		if slices.Contains(now, f) {
			errs = append(errs, f.failure())
		}
	}
	return errs
}

// failing reads the states of features, of all if only is empty: their failures, and why not all can be read. One feature that is damaged
// hides no other. damaged: faults tell of damage.
func (h *Host) failing(ctx context.Context, only []string, damaged bool) (failures []Finding, unread error) {
	var errs []error
	for _, f := range featuresOnly(only) {
		st, err := f.State(ctx, h.Root)
		if err != nil && !(damaged && errors.Is(err, kernel.ErrDamaged)) {
			errs = append(errs, err)
		}
		if u, ok := st.(feature.Unreads); ok {
			errs = append(errs, u.Unread().WithoutDamage().Err())
		}
		if x, ok := st.(feature.Failing); ok {
			for _, found := range x.Failures() {
				failures = append(failures, newFinding(f.Name, found))
			}
		}
	}
	return failures, errors.Join(errs...)
}

// failure is a finding as a reason.
func (f Finding) failure() error {
	if f.Remedy == "" {
		return fmt.Errorf("%s %s: %s", f.Feature, f.Check, f.Text)
	}
	return fmt.Errorf("%s %s: %s: %s", f.Feature, f.Check, f.Text, f.Remedy)
}
