// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/weir-project/weir/service"
)

// lookShare limits the searches for a user's processes to a fifth of a CPU: after a search, the next one waits this
// many times its duration. A search in a process with many descriptors takes long.
const lookShare = 4

// errTurn means that the user's turn did not come in time.
var errTurn = fmt.Errorf("%w: the search for its sockets waits for other processes of its user", service.ErrNotReady)

// turns serializes the searches for a user's processes. Root's do not wait.
type turns struct {
	mu    sync.Mutex
	users map[uint32]*turn
}

type turn struct {
	waiting int           // waiting and searching; guarded by turns.mu
	room    chan struct{} // full during a search
	next    time.Time     // earliest time of the next search; guarded by room
}

// claim waits for a user's turn. The caller searches, then calls done. more is the number of further searches of the
// same duration outside the turn.
func (t *turns) claim(ctx context.Context, uid uint32) (done func(more int), err error) {
	if uid == 0 {
		return func(int) {}, nil
	}
	u := t.enter(uid)
	select {
	case u.room <- struct{}{}:
	case <-ctx.Done():
		t.release(u)
		return nil, errTurn
	}
	wait := time.NewTimer(time.Until(u.next))
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		<-u.room
		t.release(u)
		return nil, errTurn
	}
	began := time.Now()
	return func(more int) {
		now := time.Now()
		took := now.Sub(began)
		t.mu.Lock()
		u.next = now.Add(lookShare*took + time.Duration(more)*(lookShare+1)*took)
		t.mu.Unlock()
		<-u.room
		t.release(u)
	}, nil
}

// enter returns a user's turn, and forgets users without waiting searches.
func (t *turns) enter(uid uint32) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for id, u := range t.users {
		if u.waiting == 0 && !now.Before(u.next) {
			delete(t.users, id)
		}
	}
	u := t.users[uid]
	if u == nil {
		if t.users == nil {
			t.users = map[uint32]*turn{}
		}
		u = &turn{room: make(chan struct{}, 1)}
		t.users[uid] = u
	}
	u.waiting++
	return u
}

func (t *turns) release(u *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	u.waiting--
}
