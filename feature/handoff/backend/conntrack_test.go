// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/conntrack"
)

// TestMovesPastConntrack moves a session away and back past a firewall dropping invalid packets, also in a separate
// conntrack zone.
func TestMovesPastConntrack(t *testing.T) {
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Fatal("want nft (package nftables): ", err)
	}
	for name, c := range map[string]struct {
		at   netip.AddrPort
		zone string
	}{"IPv4": {at4, ""}, "IPv6": {at6, ""}, "zone": {at4, `
	chain before { type filter hook prerouting priority raw; ct zone set 7; }
	chain out { type filter hook output priority raw; ct zone set 7; }`}} {
		t.Run(name, func(t *testing.T) {
			w := newNetwork(t, 2, c.at)
			for _, s := range w.servers {
				w.in(s.ns, func() error {
					n := exec.Command(nft, "-f", "-")
					n.Stdin = strings.NewReader(`table inet firewall {` + c.zone + `
	chain in { type filter hook input priority 0; ct state invalid counter drop; ct state established,related accept; }
}`)
					out, err := n.CombinedOutput()
					if err != nil {
						t.Skipf("need: kernel with nf_tables and conntrack: %v: %s", err, out)
					}
					return nil
				})
			}
			w.run()
			cl := w.dial()
			if err := cl.ask("hello"); err != nil {
				t.Fatal(err)
			}
			if c.zone != "" { // as the periodic reading of the zones finds
				for _, s := range w.servers {
					z, err := []uint16(nil), error(nil)
					w.in(s.ns, func() error { z, err = conntrack.Zones(); return err })
					if s.number == 1 && (len(z) != 2 || z[1] != 7) {
						t.Fatalf("zones in use: %v", z)
					}
					s.agent.zones.known.Store(&[]uint16{0, 7})
				}
			}
			big := strings.Repeat("x", 200_000) // advances the windows on every round
			for range 3 {
				for _, to := range []int{2, 1} {
					w.mustSend(cl, to)
					if err := cl.ask(big); err != nil {
						t.Fatalf("at server %d: %v", to, err)
					}
				}
			}
			for _, s := range w.servers { // TCP may slowly recover from drops
				var out []byte
				w.in(s.ns, func() (err error) {
					out, err = exec.Command(nft, "list", "chain", "inet", "firewall", "in").CombinedOutput()
					return err
				})
				if !strings.Contains(string(out), "counter packets 0 ") {
					t.Errorf("server %d: packets of the session are invalid to conntrack:\n%s", s.number, out)
				}
			}
		})
	}
}

// TestExamine checks the findings about obstacles to moves, for weir doctor.
func TestExamine(t *testing.T) {
	w := newWorld(t, 1, at4)
	s := w.servers[0]
	loose := func(v string) {
		t.Helper()
		if err := s.ns.Do(func() error { return os.WriteFile(trackLoose, []byte(v), 0) }); err != nil {
			t.Skip("need: kernel with conntrack: ", err)
		}
	}
	for v, want := range map[string]int{"1": 0, "0": 1} {
		loose(v)
		found, err := examine(w.root)
		if err != nil || len(found) != want {
			t.Errorf("nf_conntrack_tcp_loose=%s: %+v, %v: want %d findings", v, found, err, want)
		}
	}
}
