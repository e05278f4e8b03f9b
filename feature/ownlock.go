// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/kernel"
)

// ownEcho is the time after weir serve's own change in which a reported change is taken for that one. Checking it would
// find nothing, and a slot that cannot be filled would cause endless retries. A command's change in that time is found
// by the check every second.
const ownEcho = 20 * time.Millisecond

// OwnLock is the write lock for tasks of weir serve. It remembers its last release.
type OwnLock struct {
	Root *kernel.Root
	let  atomic.Int64 // time of the last release, monotonic, in ns
}

// Lock takes the write lock. unlock records the change as our own.
func (o *OwnLock) Lock(ctx context.Context) (l *kernel.WriteLock, unlock func(), err error) {
	if l, err = o.Root.Lock(ctx); err != nil {
		return nil, nil, err
	}
	return l, func() {
		l.Unlock()
		o.let.Store(int64(kernel.Monotonic()))
	}, nil
}

// Echoes reports whether a reported change is probably our own.
func (o *OwnLock) Echoes() bool {
	return time.Duration(int64(kernel.Monotonic())-o.let.Load()) < ownEcho
}
