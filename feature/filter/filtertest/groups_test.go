// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
)

// tuples returns rules, many comparing the same fields, with others in between.
func tuples(r *rand.Rand, n int) []compile.Rule {
	shapes := []func() string{
		func() string {
			return fmt.Sprintf("ip.src == 10.1.2.%d and udp.dstport == %d", r.IntN(6), pick(r, ports))
		},
		func() string {
			return fmt.Sprintf("udp.dstport == %d and ip.src == 10.%d.0.0/16", pick(r, ports), r.IntN(3))
		},
		func() string { return fmt.Sprintf("tcp and tcp.dstport == %d", pick(r, ports)) },
		func() string {
			return fmt.Sprintf("ipv6.src == 2001:db8::%d and ipv6.hlim == %d", r.IntN(3), pick(r, []int{0, 1, 64, 255}))
		},
		func() string {
			return fmt.Sprintf("tcp.flags == %d and tcp.hdr_len == %d", pick(r, []int{2, 18, 16}), 20+4*r.IntN(3))
		},
		func() string { return text(r, Kinds{}, 1) },
	}
	rules := make([]compile.Rule, n)
	for i := range rules {
		rules[i] = compile.Rule{Match: expr.MustParse(shapes[r.IntN(len(shapes))]()), Action: pick(r, []compile.Action{compile.Pass, compile.Drop, compile.Count, compile.Count})}
	}
	return rules
}

// The order of rules holds for lookups and for rules tested in turn.
func TestGroups(t *testing.T) {
	for _, h := range hooks {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			seed := uint64(time.Now().UnixNano())
			r := rand.New(rand.NewPCG(seed, 2))
			var all Result
			for range 6 {
				rules := tuples(r, 100)
				p, err := compile.Compile(rules, Options(h))
				if err != nil {
					t.Fatal(err)
				}
				if n := strings.Count(fmt.Sprint(p.Spec.Maps), "filter_g"); n < 2 {
					t.Fatalf("got only %d groups", n)
				}
				res, err := compare(Options(h), rules, samples(r, h, 500))
				if err != nil {
					t.Fatal(err)
				}
				all.Add(res)
			}
			report(t, seed, all)
		})
	}
}

// If all rules require IPv4, IPv6 packets are not dissected. The counts are the same.
func TestOnlyIPv4(t *testing.T) {
	for _, h := range hooks {
		t.Run(h.String(), func(t *testing.T) {
			needHook(t, h)
			seed := uint64(time.Now().UnixNano())
			r := rand.New(rand.NewPCG(seed, 6))
			var all Result
			for range 3 {
				rules := make([]compile.Rule, 20)
				for i := range rules {
					rules[i] = compile.Rule{Match: expr.MustParse("ip.ttl < 200 and (" + text(r, Kinds{}, 2) + ")"), Action: compile.Count}
				}
				res, err := compare(Options(h), rules, samples(r, h, 300))
				if err != nil {
					t.Fatal(err)
				}
				all.Add(res)
			}
			report(t, seed, all)
		})
	}
}
