// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
)

// left has a flow go to the host for which its session has left another one, which has told so. a.mu is held.
func (a *Agent) left(k Key, from move.Host, m move.Message) error {
	if !a.f.serves(m.Host, k.Service) {
		return fmt.Errorf("host %d does not serve it", m.Host)
	}
	_, err := a.f.Change(k, func(fl *Flow) {
		if fl.Left(from, m.Host, m.Epoch) {
			fl.Life = 0
		}
	})
	if errors.Is(err, ErrNoFlow) { // forgotten meanwhile
		if err = a.f.Learn(k, m.Host, m.Epoch); errors.Is(err, ebpf.ErrKeyExist) {
			err = nil
		}
	}
	return err
}
