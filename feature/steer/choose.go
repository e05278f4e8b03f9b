// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"

	"github.com/weir-project/weir/kernel"
)

// engineNeeds are what an engine cannot do without, and what it makes use of.
func engineNeeds(kind Engine) []kernel.Need {
	needs := []kernel.Need{kernel.SkLookup, kernel.SockMap}
	if kind == EngineReuseport {
		needs = []kernel.Need{kernel.SkReuseport, kernel.ReuseportArray}
	}
	for i := range needs {
		needs[i].Optional = false
	}
	return append(needs, kernel.PidfdGetfd, kernel.SockDiag,
		kernel.ExitTracepoint, kernel.RingBuffer, kernel.SocketTracepoint, kernel.PostBind, kernel.NetnsCookie, kernel.DiagDestroy)
}

// reuseportable says why engine sk_reuseport cannot steer a service.
func (s Service) reuseportable() error {
	for _, l := range s.Listen {
		if l.Prefix.IsValid() && l.Prefix.Bits() != 0 && !l.Prefix.IsSingleIP() {
			return fmt.Errorf("listen %q is a prefix; its program chooses among sockets that are bound to the same address: list addresses, or use sk_lookup", l)
		}
	}
	for _, m := range s.Members {
		if len(m.Bound) > 0 {
			return fmt.Errorf("slot %d is bound elsewhere than at the listen; its program chooses among sockets that share the service's port: use sk_lookup", m.Slot)
		}
	}
	return nil
}

// chooseEngine settles engine: auto, and says why. A service that stands keeps
// the engine it has.
func chooseEngine(s Service, old *published) (Engine, string, error) {
	if s.Engine != EngineAuto {
		return s.Engine, "the configuration names it", nil
	}
	if s.Generations != nil {
		return EngineSkLookup, "generations need it", kernel.Require([]kernel.Need{kernel.SkLookup})
	}
	if s.By == ByQUIC {
		return EngineReuseport, "by: quic reads packets, which sk_lookup does not see", s.reuseportable()
	}
	if old != nil {
		return old.Engine, old.Why, nil
	}
	missing := kernel.SkLookup.Check()
	if missing == nil {
		return EngineSkLookup, "it needs no help of the sockets and no process that holds them", nil
	}
	if err := s.reuseportable(); err != nil {
		return "", "", fmt.Errorf("engine auto: %w; and sk_reuseport cannot do it: %w", missing, err)
	}
	return EngineReuseport, "this kernel has no sk_lookup", nil
}
