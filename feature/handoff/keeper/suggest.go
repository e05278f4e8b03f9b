// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
)

var _ feature.Suggester = Feature{}

// Suggest implements feature.Suggester: a keeper for TCP servers with a unit.
func (Feature) Suggest(h inventory.Host) []feature.Suggestion {
	var allow strings.Builder
	for _, p := range h.Programs {
		if p.Local() || !p.Has("tcp") || p.Netns != "" || p.Role == inventory.Access || p.Role == inventory.Routing || p.Role == inventory.Own {
			continue
		}
		for _, i := range p.Instances {
			if strings.HasSuffix(i.Unit, ".service") && i.Container == "" {
				fmt.Fprintf(&allow, "      - %s\n", feature.Scalar(p.Service+":unit="+i.Unit))
			}
		}
	}
	if allow.Len() == 0 {
		return nil
	}
	return []feature.Suggestion{{Text: "handoff:\n  keeper:\n    hold: 2m\n    allow:\n" + allow.String(),
		Reason: []string{"Live TCP sessions outlive a restart of their process, if the program uses clients/go/handoff,",
			"clients/c/weir_handoff.h or clients/python/weir_handoff.py (docs/HANDOFF.md)."}}}
}
