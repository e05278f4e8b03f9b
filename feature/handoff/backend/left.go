// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
)

// hearStrays reports departed sessions with packets still arriving here to the load balancer, until the quarantine is
// closed.
func (a *Agent) hearStrays() {
	for f, err := range a.quarantine.Strays(context.Background()) {
		if err == nil {
			err = a.tellWhere(f)
		}
		if err != nil {
			a.o.Log.Warn("cannot report a departed session to the load balancer", "err", err)
		}
	}
}

func (a *Agent) tellWhere(f repair.Flow) error {
	e, ok, err := a.quarantine.Lookup(f)
	s, known := a.known.Load().serviceAt(f.Local)
	if err != nil || !ok || e.State != quarantine.Left || e.To == 0 || !known || !a.lbHearsLeft.Load() {
		return err
	}
	return a.lb.send(peer.Frame{Flow: peer.Flow{Service: s.ID, Client: f.Remote},
		Message: move.Message{Kind: move.Left, From: move.AtSource, To: move.AtLoadBalancer, Epoch: e.Epoch, Backend: e.To}})
}
