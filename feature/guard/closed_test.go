// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"net"
	"os"
	gosync "sync"
	"testing"

	client "github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/internal/nstest"
)

// TestClosed uses a closed guard. It returns errors and its last counts, and closes no descriptors
// of others.
func TestClosed(t *testing.T) {
	need(t)
	nstest.Enter(t)
	s := listenUDP(t, "127.0.0.1:0")
	g, err := client.Attach(s, 100)
	if err != nil {
		t.Fatal(err)
	}
	flood(t, s.LocalAddr(), 5)
	before := g.Counts()
	g.Close()
	if after := g.Counts(); after.Passed != before.Passed || after.Passed != 5 {
		t.Errorf("counted %d, after Close %d: want 5", before.Passed, after.Passed)
	}
	if err := g.SetLimits(Limits{Total: 5}); !errors.Is(err, client.ErrClosed) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("SetLimits: %v, want client.ErrClosed", err)
	}
	if err := g.Attach(listenUDP(t, "127.0.0.1:0")); !errors.Is(err, client.ErrClosed) {
		t.Errorf("Attach: %v, want client.ErrClosed", err)
	}
	// Files opened now get the guard's former descriptor numbers.
	var files []*os.File
	for range 64 { // some lower numbers are free, too
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	g.Close()
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Errorf("closing the guard twice closed another descriptor: %v", err)
		}
	}
}

// TestManyAtOnce uses a guard in several goroutines while it is closed.
func TestManyAtOnce(t *testing.T) {
	need(t)
	nstest.Enter(t)
	for range 20 {
		g, err := client.New(1000)
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
					if err := g.SetLimits(Limits{Total: Limit(100 + n)}); err != nil && !errors.Is(err, client.ErrClosed) {
						t.Error(err)
					}
					_ = g.Counts()
					if n == 10 {
						if err := g.Attach(c); err != nil && !errors.Is(err, client.ErrClosed) {
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
		if err := g.SetLimits(Limits{Total: 1}); !errors.Is(err, client.ErrClosed) {
			t.Errorf("%v, want client.ErrClosed", err)
		}
	}
}

// TestGrantBinds requests more than granted in all ways of the library.
func TestGrantBinds(t *testing.T) {
	need(t)
	nstest.Enter(t)
	for _, l := range []Limit{0, MaxLimit + 1} {
		if _, err := client.NewGrant(l); err == nil {
			t.Errorf("granted %d", uint64(l))
		}
	}
	grant, err := client.NewGrant(50)
	if err != nil {
		t.Fatal(err)
	}
	defer grant.Close()
	t.Setenv(client.GrantEnv, fmt.Sprintf("%d,%d", grant.Program.Fd(), grant.State.Fd()))
	s := listenUDP(t, "127.0.0.1:0")
	if _, err := client.Attach(s, 51); !errors.Is(err, client.ErrAboveGrant) {
		t.Fatalf("51 of 50: %v, want client.ErrAboveGrant", err)
	}
	g, err := client.Attach(s, 20)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for _, l := range []Limit{51, 0, MaxLimit} {
		if err := g.SetLimits(Limits{Total: l}); !errors.Is(err, client.ErrAboveGrant) {
			t.Errorf("%s of 50: %v, want client.ErrAboveGrant", l, err)
		}
	}
	for _, l := range []Limits{{Total: 50, Dry: true}, {Total: 20, Dry: true}, {Dry: true}} {
		if err := g.SetLimits(l); !errors.Is(err, client.ErrAboveGrant) {
			t.Errorf("limits %+v pass everything: got %v, want client.ErrAboveGrant", l, err)
		}
	}
	limited(t, s, 20)
	if err := g.SetLimits(Limits{Total: 50}); err != nil {
		t.Errorf("50 of 50: %v", err)
	}
}
