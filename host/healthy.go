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

// health determines /healthz and weir_healthy: damage, unreadable instances, failures of features, and a file not in
// force. weir doctor reports each of these as a failure. It costs as much as weir status without the agents' answers.
type health struct {
	host *Host
	file *file // file of weir serve; nil: none
	port *metricsPort
	unix *socketPaths
}

// bootTime is the time after boot in which failures of features do not count: interfaces, addresses and neighbours
// appear meanwhile, and weir serve attaches to them. Damage counts at once. Tests change it.
var bootTime = 2 * time.Minute

// confirmAfter is the delay before a failure is checked again. A command may just be changing the instance.
const confirmAfter = 250 * time.Millisecond

// check returns the faults, and the reasons why something does not work; nil: everything works.
func (h health) check(ctx context.Context) ([]kernel.Fault, error) {
	faults, err := h.host.Faults(ctx)
	errs := []error{damage(faults), err}
	failures, unread := h.host.failing(ctx, nil, errs[0] != nil)
	if errs = append(errs, unread); len(failures) > 0 && time.Duration(kernel.Monotonic()) > bootTime {
		errs = append(errs, h.lasting(ctx, failures, errs[0] != nil)...)
	}
	return faults, errors.Join(append(errs, h.file.failure(), h.port.failure(), h.unix.failure())...)
}

// lasting returns the failures that still exist after confirmAfter.
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

// failing reads the states of the features in only, or of all if it is empty. It returns their failures, and why some
// are unreadable. Damage to one feature does not hide others. damaged means that faults report damage already.
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

// failure formats a finding as an error.
func (f Finding) failure() error {
	if f.Remedy == "" {
		return fmt.Errorf("%s %s: %s", f.Feature, f.Check, f.Text)
	}
	return fmt.Errorf("%s %s: %s: %s", f.Feature, f.Check, f.Text, f.Remedy)
}
