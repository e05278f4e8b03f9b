// SPDX-License-Identifier: Apache-2.0

package server

import (
	"runtime"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// A way is open when its link and the front end's are there, also where others look at the link while it comes.
func TestWaysFollowLinks(t *testing.T) {
	a := &Agent{}
	a.front = &link{a: a}
	a.front.c.Store(&peer.Conn{})
	k := &link{a: a, to: Remote{Name: "other", Number: 2}}
	p := &place{a: a}
	a.known.Store(&known{links: map[move.Host]*link{2: k}, away: map[move.Host][]*place{2: {p}}})
	for i := range 20_000 {
		k.c.Store(nil)
		var others sync.WaitGroup
		for range 2 { // the front end tells of its hosts, and comes back
			others.Go(func() {
				if i%2 == 0 {
					runtime.Gosched()
				}
				a.linkChanged(k)
			})
		}
		runtime.Gosched()
		k.c.Store(&peer.Conn{})
		a.linkChanged(k)
		others.Wait()
		if !p.ready {
			t.Fatalf("round %d: the link is there, and the way is closed", i)
		}
	}
}
