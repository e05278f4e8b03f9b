// SPDX-License-Identifier: Apache-2.0

package record

import (
	"fmt"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// ChooseEngine resolves engine: auto, with the reason. A published service keeps its engine.
func ChooseEngine(s spec.Service, old *Service) (spec.Engine, string, error) {
	if s.Engine != spec.EngineAuto {
		return s.Engine, "set in the configuration", nil
	}
	if s.Generations != nil {
		return spec.EngineSkLookup, "generations need it", kernel.Require([]kernel.Need{probe.SkLookup})
	}
	if s.By == spec.ByQUIC {
		return spec.EngineReuseport, "by: quic reads packets, and sk_lookup sees none", s.CheckReuseport()
	}
	if old != nil {
		return old.Engine, old.Reason, nil
	}
	missing := probe.SkLookup.Check()
	if missing == nil {
		return spec.EngineSkLookup, "it needs neither SO_REUSEPORT nor a socket holder", nil
	}
	if err := s.CheckReuseport(); err != nil {
		return "", "", fmt.Errorf("engine auto: %w; and sk_reuseport cannot steer it: %w", missing, err)
	}
	return spec.EngineReuseport, "this kernel has no sk_lookup", nil
}
