// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

// applyResets moves or resets the sessions misplaced by weir apply.
type applyResets struct {
	g      *cli.Globals
	resets resetFlags
}

func (x *applyResets) AddFlags(c *cobra.Command) { x.resets.addRate(c) }

func (x *applyResets) Prepare(cfg *host.Config) { cfg.Rate = x.resets.given() }

func (x *applyResets) Foresee(cmd *cobra.Command, cfg *host.Config) {
	foreseen, err := x.foreseen(cmd.Context(), cfg)
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "cannot determine the sessions to be reset:", err)
	}
	tellForeseen(cmd, x.g, foreseen...)
}

func (x *applyResets) Around(cmd *cobra.Command, cfg *host.Config, change func() error) error {
	return x.resets.change(x.g, func() ([]steer.Foreseen, error) { return x.foreseen(cmd.Context(), cfg) }, change)
}

func (x *applyResets) foreseen(ctx context.Context, cfg *host.Config) ([]steer.Foreseen, error) {
	st, err := state.Read(ctx, x.g.Host().Root)
	if err != nil {
		return nil, err
	}
	spec, _ := steer.Feature{}.Spec(cfg.Document())
	return steer.ForeseeApply(ctx, st, spec)
}
