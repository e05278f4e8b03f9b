// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
)

// redirect assigns a flow to the new backend of its session, as reported by the old backend. The caller holds mu.
func (a *Agent) redirect(k Key, from move.Backend, m move.Message) error {
	if !a.f.serves(m.Backend, k.Service) {
		return fmt.Errorf("backend %d does not serve the service", m.Backend)
	}
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Left(from, m.Backend, m.Epoch) {
			fl.Incarnation = 0
		}
	})
	if errors.Is(err, errNoFlow) { // forgotten meanwhile
		if err = a.report(k, from, move.Flow{Owner: m.Backend, Epoch: m.Epoch}); errors.Is(err, ebpf.ErrKeyExist) {
			err = nil
		}
	}
	return err
}
