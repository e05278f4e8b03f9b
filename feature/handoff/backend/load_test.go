// SPDX-License-Identifier: Apache-2.0

package backend

import "testing"

// TestLoadsToldAgain checks that a reconnected load balancer receives unchanged loads again.
func TestLoadsToldAgain(t *testing.T) {
	w := newWorld(t, 2, at4)
	s := w.servers[0]
	s.member.Member().SetLoad(7)
	known := func() bool {
		st, err := w.lbA.Status()
		if err != nil {
			t.Fatal(err)
		}
		n, ok := st.Backends[0].Loads[service]
		return ok && n == 7
	}
	w.eventually("the load balancer hears of it", known)
	w.stopF()
	w.startLB(w.hosts)
	w.eventually("the next life of the load balancer's agent hears of it", known)
}
