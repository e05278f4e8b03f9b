// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// sparse returns a sealed memfd without used memory.
func sparse(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("sparse", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	return fd
}

// heap samples the memory of objects. The returned function yields the maximum.
func heap(done <-chan struct{}) (most func() uint64) {
	var max atomic.Uint64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		for {
			metrics.Read(s)
			if n := s[0].Value.Uint64(); n > max.Load() {
				max.Store(n)
			}
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	return func() uint64 { <-ended; return max.Load() }
}

// TestStatesOneAtATime checks that a user's connections make the keeper read one state at a time, even if it rejects
// all of them.
func TestStatesOneAtATime(t *testing.T) {
	const size, connections, uid = 16 << 20, 24, 65534
	_, socket := run(t, Options{MaxState: size, MaxTotal: 2 * size, Allow: func(context.Context, string, string, Peer) error { return nil }})
	reachable(t, socket)
	fd := sparse(t, size)
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(3 * size)) // garbage does not matter here
	var members []*wire.Conn
	nstest.AsUser(t, uid, func() error {
		for i := range connections {
			c, err := wire.Dial(t.Context(), socket)
			if err != nil {
				return err
			}
			t.Cleanup(func() { c.Close() })
			if err := c.Send(&wire.Message{Type: wire.Hello, Seq: 1, Text: "talk", Name: fmt.Sprint(i)}); err != nil {
				return err
			}
			members = append(members, c)
		}
		return nil
	})
	done := make(chan struct{})
	most := heap(done)
	for _, c := range members {
		if err := c.Send(&wire.Message{Type: wire.Commit, Seq: 2, Session: 1, Flags: wire.StateFD, Sizes: [2]uint64{size, 0}}, fd); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range members {
		m := mate{t, c}
		m.hear(wire.Welcome)
		m.refused(wire.NoSession)
	}
	close(done)
	n := most()
	t.Logf("%d MiB at once", n>>20)
	if n > connections*size/3 {
		t.Errorf("the keeper had %d MiB at once, of states of %d MiB", n>>20, size>>20)
	}
}

// TestStateIsNotRead checks that the keeper reads no state for requests without one, nor before Hello.
func TestStateIsNotRead(t *testing.T) {
	_, socket := run(t, Options{MaxState: 1000})
	fd := sparse(t, 1<<40)
	m := hello(t, socket, "talk", "0")
	m.say(&wire.Message{Type: wire.Ready, Seq: 2, Flags: wire.StateFD, Sizes: [2]uint64{1 << 20, 0}}, fd)
	m.hear(wire.OK)
	nobody := connect(t, socket)
	nobody.say(&wire.Message{Type: wire.Commit, Seq: 1, Flags: wire.StateFD, Sizes: [2]uint64{100, 0}}, sparse(t, 100))
	nobody.refused(wire.Limit)
	nobody.say(&wire.Message{Type: wire.Commit, Seq: 1, State: make([]byte, 100)})
	nobody.refused(wire.NotMember)
}
