// SPDX-License-Identifier: Apache-2.0

package heap

import (
	"runtime"
	"sync"
	"testing"
)

var sink []byte

// collections is how often garbage is collected while 8 MiB of it come about.
func collections() uint32 {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 8 << 20 / 4096 {
		sink = make([]byte, 4096)
	}
	runtime.ReadMemStats(&after)
	return after.NumGC - before.NumGC
}

func TestReserve(t *testing.T) {
	reserve.once, reserve.bytes = sync.Once{}, nil // a test may run more than once
	if n := collections(); n == 0 {
		t.Fatal("without a reserve no garbage is collected")
	}
	Reserve()
	if n := collections(); n > 0 {
		t.Errorf("with a reserve garbage is collected %d times", n)
	}
}
