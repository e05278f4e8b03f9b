// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Refused requests and reports cost the keeper time, and everybody may connect. Each user but root has a share of a CPU for
// them; whoever asks for more waits, and nobody else. Costs are what these took when they were measured, not what they take
// now: a busy keeper must not make anybody wait for longer.
const (
	tollShare = 0.1                    // of a CPU
	tollBurst = 500 * time.Millisecond // of what these cost
	maxTolls  = 4096                   // users that are remembered

	refusalCost = 50 * time.Microsecond
	memberCost  = 200 * time.Microsecond // the members of a service are looked for
	reportCost  = 100 * time.Microsecond
	sessionCost = 5 * time.Microsecond // of a session in a report
	kibCost     = 5 * time.Microsecond // of a KiB of it
)

type tolls struct {
	mu    sync.Mutex
	debt  map[uint32]debt
	turns map[uint32]bool // users for whom a report is being made
}

// debt is what a user has used, as of a moment.
type debt struct {
	used time.Duration
	at   time.Time
}

// turn says whether a user may have a report now: there is none under way, and what the ones before cost is worked off.
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

// askTurn is how often a process that waits for its user's turn looks.
const askTurn = 20 * time.Millisecond

// awaitTurn waits for the process's turn to have a report, until done is called; false if nobody waits for it any more. A
// user's connections wait for each other: each that had one first and paid later would cost as much as there are of them.
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

// charge adds a cost, and returns how long the user has to wait.
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

// remaining is what is still to be worked off.
func (d debt) remaining(now time.Time) time.Duration {
	return max(0, d.used-time.Duration(tollShare*float64(now.Sub(d.at))))
}

// maxPay bounds a wait: the process may have exited meanwhile, and its sessions be others'.
const maxPay = 2 * time.Second

// pay makes a process wait that asks for too much. Its connection alone is not read meanwhile.
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

// trusted says whether a process is root's or the keeper's own user's.
func (p *process) trusted() bool { return p.UID == 0 || int(p.UID) == os.Geteuid() }

// Bounds of what waits for processes that do not read.
const (
	maxQueue        = 100_000  // messages of a connection
	maxQueueNobody  = 64       // of one without a hello
	maxQueuedBytes  = 64 << 20 // of a user other than root and the keeper's own
	messageOverhead = 256      // bytes of a message in the queue
)

func queuedSize(m *wire.Message) int64 {
	return messageOverhead + int64(len(m.Text)+len(m.Name)+len(m.State)+len(m.Unread))
}

// queues counts a message that is to wait for a process, and says whether it may. k.mu is held.
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

// unqueues counts one less. k.mu is held.
func (k *Keeper) unqueues(m *member, msg *wire.Message) {
	uid := m.process.UID
	if k.queued[uid] -= queuedSize(msg); k.queued[uid] == 0 {
		delete(k.queued, uid)
	}
}

// dequeue drops what waits for a process whose connection has ended. k.mu is held.
func (k *Keeper) dequeue(m *member) {
	for i := range m.queue {
		k.unqueues(m, &m.queue[i].message)
	}
	m.queue, m.newest = nil, nil
}
