// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// latency returns the current maximum wake-up latency, from all requests.
func latency(t *testing.T) int32 {
	t.Helper()
	b, err := os.ReadFile(device)
	if err != nil || len(b) < 4 {
		t.Fatalf("%s: %d bytes, %v", device, len(b), err)
	}
	return int32(binary.NativeEndian.Uint32(b))
}

func TestFor(t *testing.T) {
	nstest.NeedRoot(t)
	if _, err := os.Stat(device); err != nil {
		t.Skip("need: kernel with CONFIG_CPU_IDLE:", err)
	}
	asleep := func() bool { // agents of other tests may keep them awake for moments
		return nstest.Poll(time.Minute, func() error {
			if latency(t) == 0 {
				return errors.New("they are kept awake")
			}
			return nil
		}) == nil
	}
	if !asleep() {
		t.Skip("need: kernel with idle states: another program keeps the CPUs awake")
	}
	const long = 200 * time.Millisecond
	began := time.Now()
	For(long)
	For(time.Millisecond) // does not shorten the first
	if got := latency(t); got != 0 && time.Since(began) < long {
		t.Fatalf("a CPU may take %d us", got)
	}
	For(2 * long)
	nstest.Steadily(t, long+long/2, func() error {
		if got := latency(t); got != 0 && time.Since(began) < 2*long {
			return fmt.Errorf("a CPU may take %d us", got)
		}
		return nil
	})
	if !asleep() {
		t.Fatal("they stay awake")
	}
	if took := time.Since(began); took < 2*long {
		t.Errorf("they slept again after %s, and were to be awake for %s", took, 2*long)
	}
	For(time.Millisecond) // and once more
	if !asleep() {
		t.Fatal("they stay awake the second time")
	}
}

// BenchmarkFor measures a repeated call.
func BenchmarkFor(b *testing.B) {
	for b.Loop() {
		For(100 * time.Millisecond)
	}
}
