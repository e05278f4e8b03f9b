// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/lab"
	tables "github.com/weir-project/weir/lab/table"
)

func TestMain(m *testing.M) {
	lab.Enter()
	nstest.Main(m)
}

// newExperiment returns a run; a test runs a part of it. The tests are about the harness: it must detect
// faults.
func newExperiment(t *testing.T, p plan) *experiment {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require([]kernel.Need{need(kernel.TCXLink), need(kernel.NetfilterLink), need(running.DynptrSkb), need(hook.NFTMatch)}); err != nil {
		t.Skip("need: kernel", err)
	}
	e, err := lab.NewEnv(lab.Smoke, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return &experiment{plan: p, env: e, result: lab.NewResult("filter", lab.Smoke, 1)}
}

func need(n kernel.Need) kernel.Need {
	n.Optional = false
	return n
}

func newTestWorld(t *testing.T, x *experiment, talks bool) *world {
	t.Helper()
	w, err := newWorld(x.env, "test", talks)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// At each location, the harness detects a program of another expression, and agrees with one of the right
// expression.
func TestWatchFindsOtherExpression(t *testing.T) {
	x := newExperiment(t, plan{})
	w := newTestWorld(t, x, false)
	r := rand.New(rand.NewPCG(1, 1))
	for _, p := range locations() {
		for _, c := range []struct {
			asked string
			wrong bool
		}{{"ip.ttl == 64", false}, {"ip.ttl == 1", true}} {
			h := &watch{location: p, exprs: []*expr.Expr{expr.MustParse("ip.ttl == 64")}}
			remove, err := h.put(w, x.env.Root)
			if err != nil {
				t.Fatalf("%s: %v", p.name, err)
			}
			h.exprs[0] = expr.MustParse(c.asked)
			found, sent := 0, 0
			for sent < 20 {
				p := newPacket(r, w.macs, true)
				if h.expect(p) == 0 {
					continue
				}
				sent++
				if err := w.send(p); err != nil {
					t.Fatal(err)
				}
				if c.wrong && found > 0 {
					continue // enough: each failure waits
				}
				wrong, err := h.check()
				if err != nil {
					t.Fatal(err)
				}
				found += len(wrong)
			}
			if (found > 0) != c.wrong {
				t.Errorf("%s: %d wrong verdicts on %s", p.name, found, c.asked)
			}
			remove()
		}
	}
}

// The harness detects a host with other rules than the file's, by the passed packets and by the rules'
// counts.
func TestHookFindsOtherRules(t *testing.T) {
	x := newExperiment(t, plan{packets: 100})
	w := newTestWorld(t, x, false)
	behind, err := newObserver(w)
	if err != nil {
		t.Fatal(err)
	}
	defer behind.close()
	p := product{kernel.OpenRoot(x.env.Root)}
	var rules []filter.Rule
	for _, r := range ruleFile {
		if r.name == "middle" {
			r.match = "ip.frag_offset > 9999"
		}
		rules = append(rules, filter.Rule{Name: r.name, Match: filter.Expression{Text: r.match}, Action: r.action})
	}
	if err := p.apply(t.Context(), filterAt(w, filter.HookTCX, rules...)); err != nil {
		t.Fatal(err)
	}
	got := func() (outcome, error) { c, err := p.counts(t.Context()); return c, err }
	if _, err := x.throughHook(t.Context(), w, "tcx", inStack, behind.passed, got); err != nil {
		t.Fatal(err)
	}
	if x.mismatches < 2 || !strings.Contains(strings.Join(x.result.Notes, "\n"), `rule "middle" decided 0 packets`) {
		t.Errorf("%d mismatches: %q", x.mismatches, x.result.Notes)
	}
	if err := p.apply(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A filter treating missing bytes as absent is evaded. weir's default is not.
func TestEvasionsAreFound(t *testing.T) {
	if _, err := lab.Find("nft"); err != nil {
		t.Skip("need: tool nft")
	}
	for _, u := range []filter.Unreadable{filter.AbsentUnreadable, filter.MatchUnreadable} {
		t.Run(string(u), func(t *testing.T) {
			x := newExperiment(t, plan{})
			e := &evasion{experiment: x, unreadable: u, points: []point{evasionPoints[2], evasionPoints[5], evasionPoints[15]}}
			if err := e.all(t.Context()); err != nil {
				t.Fatal(err)
			}
			m := x.result.Metrics
			if got := m["evasions"]; (got > 0) != (u == filter.AbsentUnreadable) {
				t.Errorf("%v evasions: %q", got, x.result.Notes)
			}
			// A kernel without tunnels answers fewer shapes, but every kernel answers these.
			if m["evasion_shapes_answered"] < 30 || m["nft_evasions"] == 0 || m["evasion_innocents_lost"] != 0 {
				t.Errorf("%v: %q", m, x.result.Notes)
			}
		})
	}
}

// The harness detects a change with a gap between the old and the new rules.
func TestSwapFindsGap(t *testing.T) {
	x := newExperiment(t, plan{swapFor: 300 * time.Millisecond})
	for _, gap := range []bool{false, true} {
		w, err := newWorld(x.env, map[bool]string{false: "whole", true: "gap"}[gap], true)
		if err != nil {
			t.Fatal(err)
		}
		sinks, err := swapSinks(w)
		if err != nil {
			t.Fatal(err)
		}
		s, err := socketSwapper(sinks)
		if err != nil {
			t.Fatal(err)
		}
		to := s.to
		s.to = func(set int) error {
			for _, c := range sinks {
				if gap && set > 0 {
					err := onSocket(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_BPF, 0) })
					if err != nil {
						return err
					}
				}
			}
			if gap {
				time.Sleep(time.Millisecond)
			}
			return to(set)
		}
		wrong, err := x.swapUnderFlood(t.Context(), w, s, sinks)
		if err != nil {
			t.Fatal(err)
		}
		if (wrong > 0) != gap {
			t.Errorf("gap %t: %v packets past none or both of the sets", gap, wrong)
		}
	}
}

// The list's two programs find the same addresses. The harness detects a program without results.
func TestFindSame(t *testing.T) {
	x := newExperiment(t, plan{list: 5000})
	r := rand.New(rand.NewPCG(1, 1))
	entries := tables.Sparse4(x.list, r)
	finders, err := x.finders(t.Context(), entries)
	for _, f := range finders {
		defer f.c.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	src, err := x.newSource("test", among(entries, r))
	if err != nil {
		t.Fatal(err)
	}
	defer src.close()
	if err := findSame(t.Context(), finders[0], finders[1], src); errors.Is(err, errLive) {
		t.Skip("need: kernel", err)
	} else if err != nil {
		t.Error(err)
	}
	if err := findSame(t.Context(), finders[0], finders[2], src); err == nil {
		t.Error("a program without results finds as much as the table")
	}
}

// The measurement grows with the work: 300 rules of nftables cost more than 100, by more than the machine's
// noise.
func TestCostOfRules(t *testing.T) {
	if _, err := lab.Find("nft"); err != nil {
		t.Skip("need: tool nft")
	}
	x := newExperiment(t, plan{})
	src, err := x.newSource("test", anywhere(rand.New(rand.NewPCG(1, 1))))
	if err != nil {
		t.Fatal(err)
	}
	defer src.close()
	rules := unrelatedRules(300)
	sites := []*site{{name: "none"}}
	for _, n := range []int{0, 100, 300} {
		ns, name, err := x.env.Namespace("n" + string(rune('a'+n/10)))
		if err != nil {
			t.Fatal(err)
		}
		if err := x.env.NFT(t.Context(), name, ending+nftRules(rules[:n])); err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			sites[0].ns = ns
		} else {
			sites = append(sites, &site{ns: ns})
		}
	}
	for range 9 {
		for _, s := range sites {
			each, err := src.cpu(s.ns, 4000)
			if errors.Is(err, errLive) {
				t.Skip("need: kernel", err)
			} else if err != nil {
				t.Fatal(err)
			}
			s.ns1 = append(s.ns1, each)
		}
	}
	for i, s := range sites[1:] {
		if a, b := median(sites[i].ns1), median(s.ns1); b <= a {
			t.Errorf("site %d: %.0f ns, and %.0f with more rules", i, a, b)
		}
	}
}

func TestChecksum(t *testing.T) {
	// RFC 1071, 3.
	if got := checksum([]byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}); got != 0x220d {
		t.Errorf("%#x", got)
	}
	if got := checksum([]byte{0xff, 0xff}); got != 0xffff {
		t.Errorf("%#x: 0 would mean no checksum", got)
	}
}
