// SPDX-License-Identifier: Apache-2.0

package keeper

import "sync"

// fetches serializes the reading of large states for each user. A state is read before its request is validated.
// Without turns, one user's connections together could use a multiple of the keeper's limits.
type fetches struct {
	mu    sync.Mutex // not held while waiting for a turn
	turns map[uint32]*turn
}

// turn is a user's lock.
type turn struct {
	sync.Mutex
	waiting int // connections holding or awaiting it
}

// turn waits for the turn of the process's user. It lasts until done is called. Root and the keeper's own user are
// trusted and do not wait.
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
