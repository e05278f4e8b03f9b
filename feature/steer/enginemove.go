// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/json"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// keepMove writes down what the service and its members are.
func (t target) keepMove(l *kernel.WriteLock, was *record.Service, held map[int]engine.HeldSlot) error {
	m := engine.EngineMove{Scope: t.scope, Service: t.service.Name, OnEmpty: map[spec.Engine]spec.OnEmpty{was.Engine: was.Service.OnEmpty}, Held: map[int]engine.MovedSlot{}}
	for _, kind := range record.Engines {
		if kind != was.Engine {
			m.OnEmpty[kind] = t.service.OnEmpty
		}
	}
	for slot, h := range held {
		who, err := slots.FindProcess(h.Member.PID)
		if err != nil {
			continue // it has just exited
		}
		m.Held[slot] = engine.MovedSlot{Member: h.Member, Start: who.Start, Counts: h.Counts}
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return l.Keep(engine.KeptMove, text)
}
