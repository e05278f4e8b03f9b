// SPDX-License-Identifier: Apache-2.0

package keeper

import "github.com/weir-project/weir/feature/handoff/wire"

// load records a member's load, and sends it to the balancing members.
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

// unload reports a disconnected member as unusable, unless another member of its name has a load.
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

// tellMembers sends agents of servers the number of ready members on this host. At zero they receive no sessions.
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

// tellLoads sends the known loads to a new member.
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
