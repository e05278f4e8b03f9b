// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"net"
	"os"
	gosync "sync"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// TestClosed uses a guard that is closed: errors, the last counts, and nobody else's descriptor is closed with it.
func TestClosed(t *testing.T) {
	need(t)
	nstest.Enter(t)
	s := listenUDP(t, "127.0.0.1:0")
	g, err := Attach(s, 100)
	if err != nil {
		t.Fatal(err)
	}
	flood(t, s.LocalAddr(), 5)
	before := g.Counts()
	g.Close()
	if after := g.Counts(); after.Passed != before.Passed || after.Passed != 5 {
		t.Errorf("counted %d, after Close %d: want 5", before.Passed, after.Passed)
	}
	if err := g.SetLimits(Limits{Total: 5}); !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("SetLimits: %v, want ErrClosed", err)
	}
	if err := g.Attach(listenUDP(t, "127.0.0.1:0")); !errors.Is(err, ErrClosed) {
		t.Errorf("Attach: %v, want ErrClosed", err)
	}
	// What is opened now gets the numbers that the guard had.
	var files []*os.File
	for range 64 { // some numbers below are free, too
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	g.Close()
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Errorf("closing the guard twice closed somebody else's: %v", err)
		}
	}
}

// TestManyAtOnce has several goroutines use a guard while it is closed.
func TestManyAtOnce(t *testing.T) {
	need(t)
	nstest.Enter(t)
	for range 20 {
		g, err := New(1000)
		if err != nil {
			t.Fatal(err)
		}
		var conns []udpServer
		for range 4 {
			conns = append(conns, listenUDP(t, "127.0.0.1:0"))
		}
		var wg gosync.WaitGroup
		for i, c := range conns {
			wg.Go(func() {
				for n := range 50 {
					if err := g.SetLimits(Limits{Total: Limit(100 + n)}); err != nil && !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					_ = g.Counts()
					if n == 10 {
						if err := g.Attach(c); err != nil && !errors.Is(err, ErrClosed) {
							t.Error(err)
						}
					}
					if i == 0 && n == 25 {
						g.Close()
					}
				}
			})
		}
		wg.Wait()
		if err := g.SetLimits(Limits{Total: 1}); !errors.Is(err, ErrClosed) {
			t.Errorf("%v, want ErrClosed", err)
		}
	}
}

// TestGrantBinds asks for more than was granted, in all ways that the library has.
func TestGrantBinds(t *testing.T) {
	need(t)
	nstest.Enter(t)
	for _, l := range []Limit{0, MaxLimit + 1} {
		if _, err := NewGrant(l); err == nil {
			t.Errorf("granted %d", uint64(l))
		}
	}
	grant, err := NewGrant(50)
	if err != nil {
		t.Fatal(err)
	}
	defer grant.Close()
	t.Setenv(GrantEnv, fmt.Sprintf("%d,%d", grant.Program.Fd(), grant.State.Fd()))
	s := listenUDP(t, "127.0.0.1:0")
	if _, err := Attach(s, 51); !errors.Is(err, ErrAboveGrant) {
		t.Fatalf("51 of 50: %v, want ErrAboveGrant", err)
	}
	g, err := Attach(s, 20)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for _, l := range []Limit{51, 0, MaxLimit} {
		if err := g.SetLimits(Limits{Total: l}); !errors.Is(err, ErrAboveGrant) {
			t.Errorf("%s of 50: %v, want ErrAboveGrant", l, err)
		}
	}
	for _, l := range []Limits{{Total: 50, Dry: true}, {Total: 20, Dry: true}, {Dry: true}} {
		if err := g.SetLimits(l); !errors.Is(err, ErrAboveGrant) {
			t.Errorf("%+v, which passes everything: %v, want ErrAboveGrant", l, err)
		}
	}
	limited(t, s, 20)
	if err := g.SetLimits(Limits{Total: 50}); err != nil {
		t.Errorf("50 of 50: %v", err)
	}
}

// TestGrantOfTwoSockets has a guard for each of two sockets of one grant: they have one state, so the limits of one are not
// put in force while those of the other are.
func TestGrantOfTwoSockets(t *testing.T) {
	need(t)
	nstest.Enter(t)
	grant, err := NewGrant(1000)
	if err != nil {
		t.Fatal(err)
	}
	defer grant.Close()
	t.Setenv(GrantEnv, fmt.Sprintf("%d,%d", grant.Program.Fd(), grant.State.Fd()))
	var guards []*Guard
	for range 2 {
		g, err := Attach(listenUDP(t, "127.0.0.1:0"), 500)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		guards = append(guards, g)
	}
	for i, g := range guards {
		changing.Lock() // as whoever changes the other does
		done := make(chan error, 1)
		go func() { done <- g.SetLimits(Limits{Total: 600}) }()
		select {
		case err := <-done:
			t.Errorf("guard %d: limits are put in force while another's are: %v", i, err)
			done <- nil
		case <-time.After(50 * time.Millisecond):
		}
		changing.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for i, g := range guards {
		if got := g.state.limits(); got != (Limits{Total: 600}.layout()) {
			t.Errorf("guard %d: in force is %+v", i, got)
		}
	}
}
