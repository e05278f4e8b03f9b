// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// PlanRemove implements feature.RemovePlanner. A configuration without steering keeps bindings, but Remove removes
// them.
func (f Feature) PlanRemove(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
	st, err := f.State(ctx, r)
	if err != nil {
		return feature.Plan{}, err
	}
	plan, err := f.Plan(ctx, st, spec.Config{})
	if err != nil {
		return plan, err
	}
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, err
	}
	for _, i := range all {
		if kind, ok := record.EngineKind(i); ok && kind == spec.EngineSkLookup {
			if err := bindingsLost(&plan, r, i); err != nil {
				plan.Warn("bindings with lost traffic in %s are unknown: %v", i.Scope, err)
			}
		}
	}
	return plan, nil
}

// bindingsLost adds the outages of an engine's removal: services with bindings and a socket.
func bindingsLost(plan *feature.Plan, r *kernel.Root, i kernel.Instance) error {
	v, err := bindings.OpenServices(r, i.Scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer v.Close()
	ns, err := slots.OpenNetns("", v.Pins.Meta.ID())
	if err != nil {
		return nil // the namespace is gone
	}
	defer ns.Close()
	labels, err := v.Labels.All()
	if err != nil {
		return err
	}
	configured, _, err := record.ReadAll(r, i.Scope, spec.EngineSkLookup)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		if labels[name].Bindings == 0 || enough(plan) {
			continue
		}
		served := configured[name] != nil
		for kind := range uint32(engine.KindsIPv4) {
			has, err := v.HasSocket(name, kind)
			if err != nil {
				return err
			}
			served = served || has
		}
		if served {
			plan.Outage("%s in %s lead to service %s with a socket: their traffic would follow the kernel's own choice (weir bind list shows them)", printable.Count(labels[name].Bindings, "binding"), ns, name)
		}
	}
	return nil
}
