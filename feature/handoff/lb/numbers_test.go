// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// from connects from a host's namespace, registers the host's address, and stores the announcements.
// It retries until the load balancer listens.
func from(t *testing.T, ns *netns.Handle, ca *peertest.Authority, name string, number move.Backend, address string) (h *registrar) {
	t.Helper()
	r := peer.Registration{Weight: 1}
	if address != "" {
		r.Address = netip.MustParseAddr(address)
	}
	h = &registrar{}
	note := &peer.Beside{Register: r, Peers: func(p peer.Peers) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.told = p
	}}
	nstest.Eventually(t, func() error {
		return ns.Do(func() (err error) {
			h.c, err = peer.Dial(t.Context(), "10.2.0.1:7946", "lb", ca.TLS(name), peer.Hello{Number: number, Instance: peer.NewInstance(), Name: name, Beside: note})
			return err
		})
	})
	t.Cleanup(func() { h.c.Close() })
	go func() {
		for {
			if _, err := h.c.Receive(); err != nil {
				h.mu.Lock()
				h.err = err
				h.mu.Unlock()
				return
			}
		}
	}()
	return h
}

// refused waits for a rejection.
func (h *registrar) refused(t *testing.T, says string) {
	t.Helper()
	h.hears(t, func(p peer.Peers) bool { return strings.Contains(p.Rejected, says) })
}

// TestNumberOutlivesAgent checks that no other backend gets a number with flows after a restart of
// the agent. Without kept names, as after an earlier weir, the number's own backend proves itself by
// its location.
func TestNumberOutlivesAgent(t *testing.T) {
	for name, c := range map[string]struct {
		loses func(*scene, *testing.T, *kernel.Root)
		says  string
	}{"named": {nil, "number 1 belongs to backend h1"}, "of an earlier weir": {(*scene).unnamed, "number 1 has flows of a backend of unknown name"},
		"with a lost pin": {(*scene).unpinned, "number 1 has flows of a backend of unknown name"}} {
		t.Run(name, func(t *testing.T) {
			sc := newScene(t)
			sc.f.Close()
			serve(t, sc.hosts, service4)
			root := kernel.OpenRoot(nstest.BPFFS + "/lb-numbers")
			ca := peertest.NewAuthority(t)
			text := fileOf(ca, sc.devices, "register: true\n")
			stop := running(t, sc, root, text)
			t.Cleanup(func() {
				if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
					t.Error(err)
				}
			})
			one := from(t, sc.hosts[0], ca, "h1", 1, "10.2.0.2")
			one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
			conn := dialed(t, sc)
			stop()
			one.c.Close()
			if c.loses != nil {
				c.loses(sc, t, root)
			}
			stop = running(t, sc, root, text)
			defer func() { stop() }()
			from(t, sc.hosts[1], ca, "evil", 1, "10.2.1.2").refused(t, c.says)
			time.Sleep(resumeTimeout + time.Second) // the agent then removes the location of an absent backend
			from(t, sc.hosts[1], ca, "evil", 1, "10.2.1.2").refused(t, c.says)
			stop() // the number stays closed over a second restart, too
			stop = running(t, sc, root, text)
			from(t, sc.hosts[1], ca, "evil", 1, "10.2.1.2").refused(t, c.says)
			one = from(t, sc.hosts[0], ca, "h1", 1, "10.2.0.2")
			one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 && p.Rejected == "" })
			nstest.Eventually(t, func() error {
				if got, err := ask(conn, "b", time.Second); err != nil || got[0] != '1' {
					return fmt.Errorf("%q, %v: want host 1", got, err)
				}
				return nil
			})
			from(t, sc.hosts[1], ca, "evil", 1, "10.2.1.2").refused(t, "number 1 belongs to backend h1")
			from(t, sc.hosts[0], ca, "h1", 2, "10.2.0.2").refused(t, "backend h1 has number 1")
		})
	}
}

// unnamed removes the names from the pins, as of an earlier weir.
func (s *scene) unnamed(t *testing.T, root *kernel.Root) {
	t.Helper()
	l := s.lock(t, root)
	defer l.Unlock()
	o, err := l.Open(instanceKey(s.middle, "lb"))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	links, err := o.Links()
	if err != nil {
		t.Fatal(err)
	}
	if o.Maps[names.MapName] == nil {
		t.Fatal("the names are not pinned")
	}
	pins := maps.Clone(o.Maps)
	delete(pins, names.MapName)
	if err := l.Upgrade(o.Instance, kernel.Upgrade{Meta: o.Meta, Pins: kernel.Pins{Maps: pins}, Keep: links, Swap: func() error { return nil }}); err != nil {
		t.Fatal(err)
	}
}

// unpinned removes the pin of the names.
func (s *scene) unpinned(t *testing.T, root *kernel.Root) {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(root.Path(), "*", "*", "*", "map_"+names.MapName))
	if err != nil || len(pins) != 1 {
		t.Fatalf("pins %v, %v: want one of the names", pins, err)
	}
	if err := os.Remove(pins[0]); err != nil {
		t.Fatal(err)
	}
}

// dialed returns a connection to host 1 with data of both sides.
func dialed(t *testing.T, sc *scene) net.Conn {
	t.Helper()
	var c net.Conn
	nstest.Eventually(t, func() error {
		err := sc.client.Do(func() (err error) { c, err = net.DialTimeout("tcp", service4.String(), time.Second); return err })
		if err != nil {
			return err
		}
		got, err := ask(c, "a", time.Second)
		if err != nil || got[0] != '1' {
			c.Close()
			return fmt.Errorf("%q, %v: want host 1", got, err)
		}
		return nil
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// TestOneNumber checks that a certificate has one number, also without a registration, and that the
// number is free once the connection has ended.
func TestOneNumber(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	none, two := peer.Registration{}, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}
	evil := register(t, ca, at, "evil", 5, none)
	evil.hears(t, func(p peer.Peers) bool { return p.Rejected != "" })
	register(t, ca, at, "h5", 5, two).hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "number 5 is held by backend evil, connected from 127.0.0.1")
	})
	register(t, ca, at, "evil", 6, none).hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "backend evil has number 5, connected from 127.0.0.1")
	})
	evil.c.Close()
	nstest.Eventually(t, func() error {
		if o, owned := a.f.names.Owner(5); owned {
			return fmt.Errorf("number 5 is %s's", o.Name)
		}
		return nil
	})
	h := register(t, ca, at, "h5", 5, two)
	h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 && p.Members[0].Name == "h5" })
	for number := range move.Backend(8) { // whichever the names find first
		if err := a.f.names.Keep(10+number, "renumbered"); err != nil {
			t.Fatal(err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for number := range move.Backend(8) {
		if err := a.owns(10+number, "renumbered"); err != nil {
			t.Errorf("by a name with two kept numbers: %v", err)
		}
	}
	if a.owns(9, "renumbered") == nil {
		t.Error("a further number is free for a name with one")
	}
}

// TestRegistrationRepeatsCheck checks that a connected backend cannot register once its number or
// name belongs to another backend, as told by the partner.
func TestRegistrationRepeatsCheck(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	h := register(t, ca, at, "h2", 2, peer.Registration{})
	h.hears(t, func(p peer.Peers) bool { return p.Rejected != "" })
	if err := a.f.names.Keep(2, "other"); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}); err != nil {
		t.Fatal(err)
	}
	h.hears(t, func(p peer.Peers) bool { return strings.Contains(p.Rejected, "number 2 belongs to backend other") })
	a.mu.Lock()
	defer a.mu.Unlock()
	if m := a.members[2]; m != nil {
		t.Errorf("%+v has registered", m)
	}
}

// TestPartnerNames checks that the partner's names bind: an agent gets no number of another backend
// there, and flows of a number with another name there are left out.
func TestPartnerNames(t *testing.T) {
	ca, a, at := managedPair(t, map[move.Backend]string{5: "h5", 1: "other"})
	r := peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}
	register(t, ca, at, "evil", 5, r).hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "number 5 belongs to backend h5 at the partner")
	})
	if err := a.f.names.Keep(1, "h1"); err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[move.Backend]bool{1: false, 5: true} {
		k := Key{Client: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.2"), uint16(owner))}
		if err := a.adopt(peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Owner: owner}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.f.Flow(k); (err == nil) != want {
			t.Errorf("flow of backend %d: %v", owner, err)
		}
	}
}

// TestPartnerOwns checks that the partner's owner of a number wins over a backend that took it before
// the partner's first report, by a connection or by a registration with made-up flows. An owner of
// before stays, and so does one that has the number for longer than the partner's.
func TestPartnerOwns(t *testing.T) {
	at := netip.MustParseAddr("10.2.1.2")
	for name, c := range map[string]struct {
		registers, early, kept bool
		pair                   peer.Pair
		stays                  bool
	}{
		"connected":               {false, false, false, peer.Pair{}, false},
		"registered":              {true, false, false, peer.Pair{}, false},
		"registered, number kept": {true, false, true, peer.Pair{}, false},
		"longer there":            {true, false, false, peer.Pair{Young: map[move.Backend]int64{5: time.Hour.Milliseconds()}}, false},
		"later there":             {true, false, false, peer.Pair{Young: map[move.Backend]int64{5: 0}}, true},
		"an owner of before":      {true, true, false, peer.Pair{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			ca, a, listen := managedPair(t, nil)
			number := move.Backend(5)
			who := "evil"
			if c.early { // the scene keeps h2 as of an earlier agent
				number, who, c.pair.Kept = 2, "h2", map[move.Backend]string{2: "evil"}
			}
			r := peer.Registration{}
			if c.registers {
				r = peer.Registration{Address: at, Weight: 9}
			}
			h := register(t, ca, listen, who, number, r)
			h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 || !c.registers && p.Rejected != "" })
			if c.registers {
				if err := a.f.Learn(Key{Client: netip.MustParseAddrPort("10.1.0.9:9")}, number, 0); err != nil {
					t.Fatal(err)
				}
			}
			said := peer.Peers{Pair: &c.pair, Members: []peer.Member{{Name: "s1", Number: 5, Address: netip.MustParseAddr("10.2.0.2"), Connected: true, Up: true, Weight: 1}}}
			if c.kept { // the backend is absent at the partner since its agent's start
				said.Members, said.Pair.Kept = nil, map[move.Backend]string{5: "s1"}
			}
			if c.early {
				said.Members = nil
			}
			a.partnerSaid(said)
			if _ = h.c.Register(peer.Registration{Address: at, Weight: 9}); c.stays { // fails on a closed connection
				h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 && p.Members[0].Name == who })
			} else {
				register(t, ca, listen, who, number, r).hears(t, func(p peer.Peers) bool {
					return strings.Contains(p.Rejected, "number 5 belongs to backend s1")
				})
			}
			want := who
			if !c.stays {
				want = "s1"
			}
			if o, _ := a.f.names.Owner(number); o.Name != want {
				t.Errorf("number %d is %s's, want %s's", number, o.Name, want)
			}
			a.mu.Lock()
			defer a.mu.Unlock()
			if m := a.members[number]; m != nil && m.Name != want {
				t.Errorf("backend %d is %s, want %s", number, m.Name, want)
			}
			if _, err := a.f.Flow(Key{Client: netip.MustParseAddrPort("10.1.0.9:9")}); c.registers && (err == nil) != c.stays {
				t.Errorf("the flow made up: %v, and the owner stays: %t", err, c.stays)
			}
		})
	}
}

// TestEnrollAsksPartner checks that a connection whose number the partner names otherwise cannot
// register, even before the report is processed.
func TestEnrollAsksPartner(t *testing.T) {
	ca, a, at := managedPair(t, nil)
	h := register(t, ca, at, "evil", 5, peer.Registration{})
	h.hears(t, func(p peer.Peers) bool { return p.Rejected != "" })
	a.pair.mu.Lock()
	a.pair.names = map[move.Backend]string{5: "s1"}
	a.pair.mu.Unlock()
	if err := h.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}); err != nil {
		t.Fatal(err)
	}
	h.hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "number 5 belongs to backend s1 at the partner")
	})
}
