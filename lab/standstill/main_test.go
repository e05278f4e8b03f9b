// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

// Threads wait during a stall, and not beyond its maximum.
func TestStandsStill(t *testing.T) {
	nstest.NeedRoot(t)
	for try := 1; ; try++ {
		ctx, cancel := context.WithCancel(t.Context())
		s := lab.WatchStalls()
		wait, err := plan{busy: 200 * time.Millisecond, pause: 50 * time.Millisecond, seed: uint64(try)}.start(ctx)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		cancel()
		wait()
		_, _, longest := s.Stop()
		if longest > 50*time.Millisecond {
			return
		}
		if try == 5 {
			t.Fatalf("longest wait of a thread: %v", longest)
		}
	}
}

func TestStatus(t *testing.T) {
	nstest.NeedRoot(t)
	p := plan{busy: time.Millisecond, pause: time.Millisecond}
	for _, c := range []struct {
		args  []string
		want  int
		fails bool
	}{{[]string{"true"}, 0, false}, {[]string{"sh", "-c", "exit 3"}, 3, false}, {[]string{"no-such-program"}, 1, true}, {[]string{"sh", "-c", "kill -9 $$"}, 1, true}} {
		if got, err := run(p, c.args); got != c.want || (err != nil) != c.fails {
			t.Errorf("%q: status %d, %v", c.args, got, err)
		}
	}
}
