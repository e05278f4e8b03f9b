// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"net"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/nstest"
)

// TestPairTellsMoved checks the exchange of two load balancers with the same shares. They report
// only flows outside the hash: moved ones, and ones older than a change of shares. So each flow
// keeps its host when its path changes.
func TestPairTellsMoved(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 1}, {1, 1}})
	p.start(0)
	p.start(1)
	pairs := [2]*pairing{p.agents[0].pair, p.agents[1].pair}
	nstest.Until(t, "they know each other's shares", func() bool {
		return p.lbs[0].news.Load() == newsOfMoved && p.lbs[1].news.Load() == newsOfMoved && pairs[0].knows() && pairs[1].knows()
	})
	var conns []net.Conn
	at := map[net.Conn]byte{}
	for range 24 {
		c := dial(t, p.client, service4)
		got, err := ask(c, "a", patience)
		if err != nil {
			t.Fatal(err)
		}
		conns, at[c] = append(conns, c), got[0]
	}
	moved := conns[:4]
	known := func() (n int) {
		if err := p.lbs[1].Flows(func(Key, Flow) bool { n++; return true }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	goesOn := func(lb int) {
		t.Helper()
		p.by(lb)
		for _, c := range conns {
			if got, err := ask(c, "b", patience); err != nil || got[0] != at[c] {
				t.Fatalf("by %s: %q, %v: want host %c", lbNames[lb], got, err, at[c])
			}
		}
	}
	for _, c := range moved { // in the load balancers' records alone: the hosts' sockets stay
		if _, err := p.lbs[0].Change(keyOfConn(c, 0), func(fl *Flow) { fl.Flow = move.Flow{Owner: 3 - fl.Owner, Epoch: 1} }); err != nil {
			t.Fatal(err)
		}
	}
	nstest.Until(t, "those that have moved are known", func() bool { return known() == len(moved) })
	if n := pairs[0].told.Load(); n != uint64(len(moved)) {
		t.Errorf("%d records were told: want those of %d flows that have moved", n, len(moved))
	}
	for _, c := range moved {
		k := keyOfConn(c, 0)
		if _, err := p.lbs[0].Change(k, func(fl *Flow) { fl.Flow = move.Flow{Owner: 3 - fl.Owner, Epoch: 2} }); err != nil {
			t.Fatal(err)
		}
		p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Epoch == 2 }) // although the hash finds it again
	}
	goesOn(1)
	goesOn(0)
	// From here on all new flows go to one host.
	first := slices.IndexFunc(conns, func(c net.Conn) bool { return at[c] == '1' })
	for i, f := range p.lbs {
		hosts := slices.Clone(f.backends)
		hosts[0].Weight = 0
		if err := f.SetBackends(hosts); err != nil {
			t.Fatal(err)
		}
		p.agents[i].pairNews()
	}
	p.knows(1, keyOfConn(conns[first], 0), func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	nstest.Until(t, "the shares are the same again", func() bool { return p.lbs[0].news.Load() == newsOfMoved })
	goesOn(1)
	// An ended flow is forgotten at both, whichever has seen the end.
	k := keyOfConn(conns[first], 0)
	conns[first].Close()
	for i := range p.lbs {
		p.knows(i, k, func(_ Flow, err error) bool { return errors.Is(err, errNoFlow) })
	}
}
