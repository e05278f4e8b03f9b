// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
)

// addressOf is where a backend of a scene is.
func addressOf(number move.Backend) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 2, byte(number - 1), 2})
}

// A backend that gets another number at the same address goes on with its sessions: flows of the former number are balanced anew.
func TestRenumberedBackend(t *testing.T) {
	const number = 3
	sc := newScene(t)
	c, k, owner, _ := session(t, sc)
	manage(t, sc, AgentOptions{Managed: []Managed{{Number: number, Name: fmt.Sprint("h", number), Address: addressOf(owner), Weight: 1}}})
	waitOwners(t, sc, service4, fmt.Sprint(number))
	if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
		t.Errorf("%q, %v: want an answer of host %d", got, err, owner)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != number || fl.Epoch != 1 {
		t.Errorf("%+v, %v: want backend %d's in epoch 1", fl, err, number)
	}
}
