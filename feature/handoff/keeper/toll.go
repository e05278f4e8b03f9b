// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Rejected requests and reports cost the keeper time, and everybody may connect. Each user except root has a share of
// a CPU for them. A user above the share waits, without delaying others. Costs are fixed measured values, not current
// durations, because a busy keeper must not lengthen the waits.
const (
	tollShare = 0.1                    // of a CPU
	tollBurst = 500 * time.Millisecond // of cost
	maxTolls  = 4096                   // remembered users

	refusalCost = 50 * time.Microsecond
	memberCost  = 200 * time.Microsecond // looks up the members of a service
	reportCost  = 100 * time.Microsecond
	sessionCost = 5 * time.Microsecond // each, in a report
	kibCost     = 5 * time.Microsecond // each, of a report's text
)

type tolls struct {
	mu    sync.Mutex
	debt  map[uint32]debt
	turns map[uint32]bool // users with a report under way
}

// debt is a user's used time at a moment.
type debt struct {
	used time.Duration
	at   time.Time
}

// turn starts a user's report. It returns false if one is under way, or the user's debt exceeds the burst.
func (t *tolls) turn(uid uint32, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.turns[uid] || t.debt[uid].remaining(now) > tollBurst {
		return false
	}
	if t.turns == nil {
		t.turns = map[uint32]bool{}
	}
	t.turns[uid] = true
	return true
}

func (t *tolls) endTurn(uid uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.turns, uid)
}

// askTurn is the polling interval of a process waiting for its user's turn.
const askTurn = 20 * time.Millisecond

// awaitTurn waits for the turn of the process's user to get a report, until done is called. It returns false if the
// process has exited. A user's connections take turns: otherwise many could each get a report first and pay later.
func (k *Keeper) awaitTurn(ctx context.Context, p *process) (done func(), ok bool) {
	if p.trusted() {
		return func() {}, true
	}
	tick := time.NewTicker(askTurn)
	defer tick.Stop()
	for !k.tolls.turn(p.UID, time.Now()) {
		select {
		case <-ctx.Done():
			return nil, false
		case <-tick.C:
		}
		if p.exited() {
			return nil, false
		}
	}
	return func() { k.tolls.endTurn(p.UID) }, true
}

// charge adds a cost, and returns the user's waiting time.
func (t *tolls) charge(uid uint32, cost time.Duration, now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.debt == nil {
		t.debt = map[uint32]debt{}
	}
	if len(t.debt) >= maxTolls {
		for u, d := range t.debt {
			if d.remaining(now) == 0 {
				delete(t.debt, u)
			}
		}
	}
	used := t.debt[uid].remaining(now) + cost
	t.debt[uid] = debt{used, now}
	return time.Duration(float64(max(0, used-tollBurst)) / tollShare)
}

// remaining returns the outstanding debt.
func (d debt) remaining(now time.Time) time.Duration {
	return max(0, d.used-time.Duration(tollShare*float64(now.Sub(d.at))))
}

// maxPay limits a wait: the process may exit meanwhile, and its sessions need a new owner.
const maxPay = 2 * time.Second

// pay delays a process that asks for too much. Only the reading of its connection is delayed.
func (k *Keeper) pay(ctx context.Context, m *member) {
	cost := m.cost
	m.cost = 0
	if cost == 0 || m.process.trusted() {
		return
	}
	wait := min(k.tolls.charge(m.process.UID, cost, time.Now()), maxPay)
	if wait <= 0 {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// trusted reports whether a process belongs to root or the keeper's own user.
func (p *process) trusted() bool { return p.UID == 0 || int(p.UID) == os.Geteuid() }

// Bounds of queues for processes that do not read.
const (
	maxQueue        = 100_000  // messages of a connection
	maxQueueNobody  = 64       // messages of a connection without Hello
	maxQueuedBytes  = 64 << 20 // of a user other than root and the keeper's own
	messageOverhead = 256      // bytes for each queued message
)

func queuedSize(m *wire.Message) int64 {
	return messageOverhead + int64(len(m.Text)+len(m.Name)+len(m.State)+len(m.Unread))
}

// queues charges a message to be queued. It returns false if the queue is full. k.mu is held.
func (k *Keeper) queues(m *member, msg *wire.Message) bool {
	most := maxQueue
	if m.service == nil {
		most = maxQueueNobody
	}
	size := queuedSize(msg)
	if len(m.queue) >= most || !m.process.trusted() && k.queued[m.process.UID]+size > maxQueuedBytes {
		return false
	}
	k.queued[m.process.UID] += size
	return true
}

// unqueues reverts the charge of one message. k.mu is held.
func (k *Keeper) unqueues(m *member, msg *wire.Message) {
	uid := m.process.UID
	if k.queued[uid] -= queuedSize(msg); k.queued[uid] == 0 {
		delete(k.queued, uid)
	}
}

// dequeue drops the queue of an ended connection. k.mu is held.
func (k *Keeper) dequeue(m *member) {
	for i := range m.queue {
		k.unqueues(m, &m.queue[i].message)
	}
	m.queue, m.newest = nil, nil
}
