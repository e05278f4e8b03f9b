// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Restorer = Feature{}

// Save implements feature.Restorer: the applied limits, null for none.
func (f Feature) Save(ctx context.Context, r *kernel.Root) ([]byte, error) {
	l, err := f.State(ctx, r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(l)
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (feature.Plan, error) {
	var was Limits
	if err := json.Unmarshal(saved, &was); err != nil {
		return feature.Plan{}, fmt.Errorf("parse the saved limits of the session keeper: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return feature.Plan{}, err
	}
	return f.Plan(ctx, have, was)
}
