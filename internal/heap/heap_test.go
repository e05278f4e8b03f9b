// SPDX-License-Identifier: Apache-2.0

package heap

import (
	"runtime"
	"sync"
	"testing"
)

var sink []byte

// collections is how often garbage is collected while so many MiB of it come about.
func collections(mib int) uint32 {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range mib << 20 / 4096 {
		sink = make([]byte, 4096)
	}
	runtime.ReadMemStats(&after)
	return after.NumGC - before.NumGC
}

func TestReserve(t *testing.T) {
	reserve.once, reserve.bytes = sync.Once{}, nil // a test may run more than once
	// A collection is counted when it ends, and on a busy machine its workers wait for a CPU.
	if n := collections(512); n == 0 {
		t.Fatal("without a reserve no garbage is collected")
	}
	Reserve()
	if n := collections(8); n > 0 {
		t.Errorf("with a reserve garbage is collected %d times", n)
	}
}
