// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// site is a namespace with one set of rules. Packets meet the rules and are dropped.
type site struct {
	name    string // of the metric
	ns      *netns.Handle
	packets int       // in a round
	ns1     []float64 // ns of a packet, by round
}

// tenThousand is the number of rules in the cases with many rules.
const tenThousand = 10_000

// shortRounds is the number of cost rounds per round of the other measurements. Shorter rounds keep the
// machine's state more alike for all ways of a round.
const shortRounds = 2

// measureCost compares the cost of rules at the same hook, before routing. The cost is the CPU time of a
// packet from the device to its drop behind the rules, minus the time without rules.
func (x *experiment) measureCost(ctx context.Context) error {
	if _, err := lab.Find("nft"); err != nil {
		x.result.Skip("%v: no comparison of the cost of rules", err)
		return nil
	}
	src, err := x.newSource("cost", anywhere(rand.New(rand.NewPCG(x.env.Seed, 3))))
	if err != nil {
		return err
	}
	defer src.close()
	sites, err := x.costSites(ctx)
	if err != nil {
		return err
	}
	x.say("cost of rules for a packet before routing, weir and nftables: %d rounds", x.rounds*shortRounds)
	err = inTurns(ctx, x.rounds*shortRounds, x.costFor, len(sites), func(way int) error {
		s := sites[way]
		each, err := src.cpu(s.ns, s.packets)
		s.ns1 = append(s.ns1, each)
		return err
	})
	if err != nil {
		return x.unlessLive(err, "no comparison of the cost of rules")
	}
	x.costs(sites)
	return nil
}

// costSites creates a namespace for each way.
func (x *experiment) costSites(ctx context.Context) ([]*site, error) {
	rules := unrelatedRules(tenThousand)
	begin := time.Now()
	one := fmt.Sprintf("udp.dstport == %d", measuredPort+1)
	hit := fmt.Sprintf("udp.dstport == %d", measuredPort)
	many := make([]string, len(rules))
	for i, u := range rules {
		many[i] = u.weir()
	}
	w := weirSites{product: product{kernel.OpenRoot(x.env.Root)}}
	var sites []*site
	for _, c := range []struct {
		name    string
		packets int
		nft     string
		hook    filter.Hook
		weir    []string
	}{
		{name: "none", packets: 20_000},
		{name: "nft_1rule", packets: 20_000, nft: chain("lab", 0, "accept", fmt.Sprintf("udp dport %d counter drop", measuredPort+1))},
		{name: "netfilter_1rule", packets: 20_000, hook: filter.HookNetfilter, weir: []string{one}},
		{name: "xtbpf_1rule", packets: 20_000, hook: filter.HookNFT, weir: []string{one}},
		{name: "nft_1rule_hit", packets: 20_000, nft: chain("lab", 0, "accept", fmt.Sprintf("udp dport %d counter drop", measuredPort))},
		{name: "netfilter_1rule_hit", packets: 20_000, hook: filter.HookNetfilter, weir: []string{hit}},
		{name: "nft_100_rules", packets: 20_000, nft: nftRules(rules[:100])},
		{name: "netfilter_100_rules", packets: 20_000, hook: filter.HookNetfilter, weir: many[:100]},
		{name: "nft_10k_rules", packets: 500, nft: nftRules(rules)},
		{name: "nft_map_10k", packets: 20_000, nft: nftMap(rules)},
		{name: "netfilter_10k", packets: 20_000, hook: filter.HookNetfilter, weir: many},
		{name: "xtbpf_10k", packets: 20_000, hook: filter.HookNFT, weir: many},
	} {
		ns, name, err := x.env.Namespace("cost-" + c.name)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(topo.Addresses(ns), x.env.NFT(ctx, name, ending+c.nft)); err != nil {
			return nil, err
		}
		sites = append(sites, &site{name: c.name, ns: ns, packets: c.packets})
		if c.weir != nil {
			w.add(name, c.hook, c.weir)
		}
	}
	if err := w.apply(ctx, w.filters...); err != nil {
		return nil, err
	}
	x.say("rules are in place after %.1f s", time.Since(begin).Seconds())
	x.env.OnClose(func() { _ = w.apply(context.Background()) }) // leftovers reports failures
	return sites, nil
}

// weirSites are weir's filters, applied together.
type weirSites struct {
	product
	filters []filter.Filter
}

func (w *weirSites) add(namespace string, h filter.Hook, matches []string) {
	f := filter.Filter{Name: "lab", Hook: h, Netns: namespace, At: "prerouting"}
	for i, m := range matches {
		f.Rules = append(f.Rules, filter.Rule{Name: fmt.Sprint("r", i), Match: filter.Expression{Text: m}, Action: filter.Drop})
	}
	w.filters = append(w.filters, f)
}

// costs sets the metrics: medians of a packet's additional time compared with no rules in the same round.
func (x *experiment) costs(sites []*site) {
	x.result.Set("cost_rounds", float64(len(sites[0].ns1)))
	x.result.Set("ns_packet_without_rules", median(sites[0].ns1))
	net := map[string]float64{}
	for _, s := range sites[1:] {
		more := make([]float64, len(s.ns1))
		for i := range more {
			more[i] = s.ns1[i] - sites[0].ns1[i]
		}
		net[s.name] = median(more)
		x.result.Set("ns_"+s.name, net[s.name])
	}
	for metric, of := range map[string][2]string{
		"ns_ratio_nft_1rule":           {"netfilter_1rule", "nft_1rule"},
		"ns_ratio_nft_1rule_hit":       {"netfilter_1rule_hit", "nft_1rule_hit"},
		"ns_ratio_nft_1rule_xtbpf":     {"xtbpf_1rule", "nft_1rule"},
		"ns_ratio_nft_100_rules":       {"netfilter_100_rules", "nft_100_rules"},
		"ns_ratio_nft_10k_rules":       {"netfilter_10k", "nft_10k_rules"},
		"ns_ratio_nft_10k_rules_xtbpf": {"xtbpf_10k", "nft_10k_rules"},
		"ns_ratio_nft_map_10k":         {"netfilter_10k", "nft_map_10k"},
		"ns_ratio_nft_map_10k_xtbpf":   {"xtbpf_10k", "nft_map_10k"},
	} {
		if net[of[1]] > 0 {
			x.result.Set(metric, net[of[0]]/net[of[1]])
		} else {
			x.result.Note("%s: %s took %.1f ns more than no rules, below the noise of the machine", metric, of[1], net[of[1]])
		}
	}
}

// median sorts a copy. For an even number it returns the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
