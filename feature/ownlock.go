// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/kernel"
)

// ownEcho is how long after a change of weir serve's own what is heard of changes is
// taken to be that one: to look for it would find nothing, and a slot that cannot
// be filled would have it try all the time. What a command does in those moments is
// found by the look that comes every second.
const ownEcho = 20 * time.Millisecond

// OwnLock is the write lock for what runs in weir serve; it knows when it was let
// go of last.
type OwnLock struct {
	Root *kernel.Root
	let  atomic.Int64 // monotonic, ns
}

// Lock takes the write lock; unlock notes the change as our own.
func (o *OwnLock) Lock(ctx context.Context) (l *kernel.WriteLock, unlock func(), err error) {
	if l, err = o.Root.Lock(ctx); err != nil {
		return nil, nil, err
	}
	return l, func() {
		l.Unlock()
		o.let.Store(int64(kernel.Monotonic()))
	}, nil
}

// Echoes says whether what is heard now is most likely a change of our own.
func (o *OwnLock) Echoes() bool {
	return time.Duration(int64(kernel.Monotonic())-o.let.Load()) < ownEcho
}
