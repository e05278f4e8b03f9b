// SPDX-License-Identifier: Apache-2.0

// Package heap has processes in whose hands live sessions stand still for a moment collect garbage seldom.
package heap

import "sync"

// reserve is never written, so that it takes no memory in a process that has just begun; the collector, which begins when the
// heap has doubled, counts it.
var reserve struct {
	once  sync.Once
	bytes []byte
}

const reserved = 16 << 20 // bytes

// Reserve has the collector begin some 16 MiB of garbage later than else. An agent's own heap is of 2 or 3 MiB, of which Go
// collects every 4 MiB: as often as twenty sessions move, each time while one of them does.
func Reserve() { reserve.once.Do(func() { reserve.bytes = make([]byte, reserved) }) }
