// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
)

// addressOf returns the address of a scene's backend.
func addressOf(number move.Backend) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 2, byte(number - 1), 2})
}

// TestRenumberedBackend checks that a backend with a new number at the same address keeps its
// sessions. Flows of the old number are reassigned.
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

// TestRemovedBackendOutlives checks that flows of a backend removed by an earlier agent are
// reassigned, including flows reported by the partner later.
func TestRemovedBackendOutlives(t *testing.T) {
	for name, later := range map[string]bool{"flows of before": false, "flows of the partner": true} {
		t.Run(name, func(t *testing.T) {
			sc, root := published(t)
			_, k, owner, other := session(t, sc)
			down(t, sc.hosts[owner-1], "w0")
			if err := sc.f.SetBackends([]Backend{sc.f.backends[other-1]}); err != nil {
				t.Fatal(err)
			}
			if later {
				if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
					t.Fatal(err)
				}
			}
			sc.f.Close()
			sc.open(t, root)
			sc.removal(t, owner, false)
			if later {
				if err := sc.f.Learn(k, owner, 0); err != nil {
					t.Fatal(err)
				}
			}
			nstest.Eventually(t, func() error {
				forge(t, sc, k.Client, service4, tcpACK)
				fl, err := sc.f.Flow(k)
				if err == nil && fl.Owner != other {
					err = fmt.Errorf("%+v: want backend %d's", fl, other)
				}
				return err
			})
		})
	}
}

// TestVacantWithoutInterface checks that a backend without its interface stays vacant, so others
// get its flows after its removal.
func TestVacantWithoutInterface(t *testing.T) {
	sc := newScene(t)
	both := slices.Clone(sc.f.backends)
	gone := both[1]
	gone.Interface = 1 << 20
	for i, c := range []struct {
		backends []Backend
		fails    bool
		vacant   bool
	}{{both, false, false}, {both[:1], false, true}, {[]Backend{both[0], gone}, true, true}, {both[:1], false, true}, {both, false, false}} {
		if err := sc.f.SetBackends(c.backends); (err != nil) != c.fails || sc.f.vacant[2] != c.vacant {
			t.Errorf("step %d: vacant %v, %v: want %v, and that it fails: %v", i, sc.f.vacant, err, c.vacant, c.fails)
		}
	}
}

// TestStatusOfUnknown checks the status of flows of a backend in no file: they stay until the
// partner does not list it either.
func TestStatusOfUnknown(t *testing.T) {
	sc := newScene(t)
	if err := errors.Join(sc.f.SetBackends(sc.f.backends[:1]), sc.f.Learn(Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")}, 2, 0)); err != nil {
		t.Fatal(err)
	}
	a, err := NewAgent(sc.f, AgentOptions{Name: "lb", TLS: peertest.NewAuthority(t).TLS("lb"), Manage: true})
	if err != nil {
		t.Fatal(err)
	}
	says := func(want string) {
		t.Helper()
		if s, err := a.Status(); err != nil || len(s.Backends) != 1 || s.Backends[0].Reason != "lb.backends does not name it"+want {
			t.Errorf("%+v, %v: want backend 2 alone, and of it %q", s.Backends, err, want)
		}
	}
	says("; its flows go to other backends in a moment")
	a.pair = newPairing()
	says("; its flows go to other backends once the partner does not name it either")
	a.o.Register = true
	says(", and it has not registered")
	if err := sc.f.removeBackend(2); err != nil {
		t.Fatal(err)
	}
	for _, register := range []bool{true, false} { // it may register within idle_timeout
		a.o.Register = register
		says("; its flows go to other backends at their next packet")
	}
}

// TestVacateUnwell checks that a half-written entry of an unwell backend does not count as removed.
// Its flows wait for it. The agent treats a remaining such entry as vacant.
func TestVacateUnwell(t *testing.T) {
	sc := newScene(t)
	_, k, owner, other := session(t, sc)
	down(t, sc.hosts[owner-1], "w0")
	if err := sc.f.SetBackends([]Backend{sc.f.backends[other-1]}); err != nil {
		t.Fatal(err)
	}
	if err := sc.f.maps.LbBackends.Put(uint32(owner), bpf.LBLbBackend{Unwell: 1}); err != nil {
		t.Fatal(err)
	}
	before, err := sc.f.Flow(k)
	if err != nil {
		t.Fatal(err)
	}
	for n := range uint64(2) {
		forge(t, sc, k.Client, service4, tcpACK)
		becomes(t, sc.f, k, "seen, at its backend", func(fl Flow) bool { return fl.Owner == owner && fl.In > before.In+n })
	}
	sc.f.vacant = nil
	if err := sc.f.noteVacant(map[move.Backend]int{owner: 1}); err != nil || !sc.f.vacant[owner] {
		t.Errorf("vacant %v, %v: want backend %d", sc.f.vacant, err, owner)
	}
	if err := sc.f.removeBackend(owner); err != nil {
		t.Fatal(err)
	}
	forge(t, sc, k.Client, service4, tcpACK)
	becomes(t, sc.f, k, "the other backend's", func(fl Flow) bool { return fl.Owner == other })
	if err := sc.f.noteVacant(map[move.Backend]int{owner: 1}); err != nil || sc.f.vacant[owner] {
		t.Errorf("vacant %v, %v: want backend %d removed", sc.f.vacant, err, owner)
	}
}

// TestReclaimTime checks that a just moved flow keeps its removed backend while the previous
// backend may reclaim it. This is 45 s, or twice move_timeout if that is more. Explain reports it.
func TestReclaimTime(t *testing.T) {
	sc, root := published(t)
	_, k, owner, other := session(t, sc)
	down(t, sc.hosts[owner-1], "w0")
	if _, err := NewAgent(sc.f, AgentOptions{MoveTimeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(sc.f.configure(), sc.f.SetBackends([]Backend{sc.f.backends[other-1]}), sc.f.removeBackend(owner)); err != nil {
		t.Fatal(err)
	}
	moved := func(ago time.Duration, says string, want move.Backend) {
		t.Helper()
		change(t, sc.f, k, func(v *bpf.LBLbFlow) {
			justMoved(v, other)
			v.Until -= uint64(ago)
		})
		if _, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); !strings.Contains(text, "was removed") != (want == owner) {
			t.Errorf("moved %s ago: %s", ago, text)
		}
		before, err := sc.f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		for n := range uint64(2) {
			forge(t, sc, k.Client, service4, tcpACK)
			becomes(t, sc.f, k, says, func(fl Flow) bool { return fl.Owner == want && (fl.In > before.In+n || want == other) })
		}
	}
	moved(100*time.Second, "the removed backend's", owner)
	moved(121*time.Second, "the other backend's", other)
}
