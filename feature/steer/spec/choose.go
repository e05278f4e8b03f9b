// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"

	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/probe"
)

// EngineNeeds returns an engine's required kernel facilities, then the optional ones.
func EngineNeeds(kind Engine) []kernel.Need {
	needs := []kernel.Need{probe.SkLookup, probe.SockMap}
	if kind == EngineReuseport {
		needs = []kernel.Need{hook.SkReuseport, hook.ReuseportArray}
	}
	for i := range needs {
		needs[i].Optional = false
	}
	return append(needs, probe.PidfdGetfd, probe.SockDiag,
		probe.ExitTracepoint, probe.RingBuffer, probe.SocketTracepoint, probe.PostBind, kernel.NetnsCookie, probe.DiagDestroy)
}

// CheckReuseport returns the reason if engine sk_reuseport cannot steer the service.
func (s Service) CheckReuseport() error {
	for _, l := range s.Listen {
		if l.Prefix.IsValid() && l.Prefix.Bits() != 0 && !l.Prefix.IsSingleIP() {
			return fmt.Errorf("listen %q is a prefix, but its program chooses among sockets bound to one address: list addresses, or use sk_lookup", l)
		}
	}
	for _, m := range s.Members {
		if len(m.Bound) > 0 {
			return fmt.Errorf("slot %d is not bound to the listen, but its program chooses among sockets on the service's port: use sk_lookup", m.Slot)
		}
	}
	return nil
}
