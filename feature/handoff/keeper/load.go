// SPDX-License-Identifier: Apache-2.0

package keeper

import "github.com/weir-project/weir/feature/handoff/wire"

// load notes what waits for a member, and tells the others that want to know.
func (k *Keeper) load(m *member, n uint32) {
	if m.loaded && m.load == n {
		return
	}
	m.load, m.loaded = n, true
	for _, o := range m.service.members {
		if o != m && o.caps&wire.Balances != 0 {
			k.post(o, outgoing{message: wire.Message{Type: wire.Loads, Name: m.name, Number: n}})
		}
	}
}

// tellLoads tells a member what is known of the others when it comes.
func (k *Keeper) tellLoads(m *member) {
	if m.caps&wire.Balances == 0 {
		return
	}
	for _, o := range m.service.members {
		if o != m && o.loaded {
			k.post(m, outgoing{message: wire.Message{Type: wire.Loads, Name: o.name, Number: o.load}})
		}
	}
}
