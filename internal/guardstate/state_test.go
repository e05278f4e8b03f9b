// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTwoOfOneState maps one state twice, like two guards of one grant. Their changes of limits
// exclude each other.
func TestTwoOfOneState(t *testing.T) {
	fd, err := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(Bytes)); err != nil {
		t.Fatal(err)
	}
	var states []*State
	for range 2 {
		s, err := Map(fd)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		states = append(states, s)
	}
	if err := states[0].Init(Limits{Total: 500}); err != nil {
		t.Fatal(err)
	}
	for i, s := range states {
		changing.Lock() // like the other one's change
		done := make(chan struct{})
		go func() { s.SetLimits(Limits{Total: 600}); close(done) }()
		select {
		case <-done:
			t.Errorf("state %d: limits are put in force while another's are", i)
		case <-time.After(50 * time.Millisecond):
		}
		changing.Unlock()
		<-done
	}
	for i, s := range states {
		if got := s.Limits(); got != (Limits{Total: 600}.Layout()) || s.Total.Version != ABI || s.Total.Seed == [2]uint64{} {
			t.Errorf("state %d: in force is %+v, version %d", i, got, s.Total.Version)
		}
	}
}
