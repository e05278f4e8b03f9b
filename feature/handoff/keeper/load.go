// SPDX-License-Identifier: Apache-2.0

package keeper

import "github.com/weir-project/weir/feature/handoff/wire"

// load notes what waits for a member, and tells the others that want to know.
func (k *Keeper) load(m *member, n uint32) {
	if m.loaded && m.load == n {
		return
	}
	m.load, m.loaded = n, true
	k.tellLoad(m)
}

func (k *Keeper) tellLoad(m *member) {
	for _, o := range m.service.members {
		if o != m && o.caps&wire.Balances != 0 {
			k.postNewest(o, wire.Loads, m.name, m.load)
		}
	}
}

// unload tells that nothing is to go any more to a member that has gone, unless another of its name is there.
func (k *Keeper) unload(m *member) {
	if !m.loaded {
		return
	}
	m.load = wire.NoLoad
	for _, o := range m.service.members {
		if o.name == m.name && o.loaded {
			m = o
		}
	}
	k.tellLoad(m)
}

// tellMembers tells agents of servers how many members of this server may be given sessions: without one nothing is to come.
func (k *Keeper) tellMembers(v *service) {
	able := 0
	for _, o := range v.members {
		if o.ready && !o.standby && !wire.Elsewhere(o.name) {
			able++
		}
	}
	if able == v.able {
		return
	}
	v.able = able
	for _, o := range v.members {
		k.tellMembersTo(o)
	}
}

func (k *Keeper) tellMembersTo(m *member) {
	if m.caps&wire.Resumes != 0 {
		k.postNewest(m, wire.Members, "", uint32(m.service.able)) // no member has this name
	}
}

// tellLoads tells a member what is known of the others when it comes.
func (k *Keeper) tellLoads(m *member) {
	if m.caps&wire.Balances == 0 {
		return
	}
	for _, o := range m.service.members {
		if o != m && o.loaded {
			k.postNewest(m, wire.Loads, o.name, o.load)
		}
	}
}
