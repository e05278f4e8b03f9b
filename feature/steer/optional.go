// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/kernel"
)

var (
	_ feature.Runner   = Feature{}
	_ feature.Mender   = Feature{}
	_ feature.Examiner = Feature{}
	_ feature.Measured = Feature{}
)

// Mend implements feature.Mender.
func (Feature) Mend(l *kernel.WriteLock) error { return engine.Mend(l) }

// Collector implements feature.Measured.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return NewCollector(r) }

// Examine implements feature.Examiner.
func (Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	all, err := Examine(ctx, r)
	var out []feature.Finding
	for _, f := range all {
		out = append(out, feature.Finding{Object: f.Service, Text: f.Text, Remedy: f.Remedy})
	}
	return out, err
}
