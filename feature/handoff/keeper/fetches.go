// SPDX-License-Identifier: Apache-2.0

package keeper

import "sync"

// fetches has the connections of one user read large states one after the other. Each is read before its request is judged: all
// connections of a user at once would take many times what the keeper keeps.
type fetches struct {
	mu    sync.Mutex // never held together with a turn
	turns map[uint32]*turn
}

// turn is a user's.
type turn struct {
	sync.Mutex
	waiting int // connections that have it or want it
}

// turn waits for a process's turn, which lasts until done is called. Root and the keeper's own user are trusted.
func (f *fetches) turn(p *process) (done func()) {
	if p.trusted() {
		return func() {}
	}
	f.mu.Lock()
	t := f.turns[p.UID]
	if t == nil {
		if f.turns == nil {
			f.turns = map[uint32]*turn{}
		}
		t = &turn{}
		f.turns[p.UID] = t
	}
	t.waiting++
	f.mu.Unlock()
	t.Lock()
	return func() {
		t.Unlock()
		f.mu.Lock()
		defer f.mu.Unlock()
		if t.waiting--; t.waiting == 0 {
			delete(f.turns, p.UID)
		}
	}
}
