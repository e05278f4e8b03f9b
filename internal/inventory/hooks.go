// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
)

// Hooked is a BPF program at a hook used by weir.
type Hooked struct {
	Hook    string // "XDP of eth0"
	Program string // `id "name"`
}

// Rules are the nftables rules of a namespace.
type Rules struct {
	Tables []string // "inet filter"
	Count  int      // number of rules
	Limits []string // chains with rate limits: "inet filter input"
}

// readHooked lists the programs at the hooks of the calling thread's namespace. Hooks unknown to this kernel, and hooks
// closed to this user, have none.
func readHooked(devices []Interface) (out []Hooked) {
	add := func(hook string, p hookorder.Program) { out = append(out, Hooked{hook, p.String()}) }
	for _, d := range devices {
		l, err := netlink.LinkByName(d.Name)
		if err != nil {
			continue
		}
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			add("XDP of "+d.Name, hookorder.Read(x.ProgId))
		}
		for name, attach := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
			all, _, err := hookorder.List(link.QueryOptions{Target: l.Attrs().Index, Attach: attach}, 0)
			if err != nil {
				continue
			}
			for _, p := range all {
				add(fmt.Sprintf("tcx %s of %s", name, d.Name), p)
			}
		}
	}
	if own, err := netns.Current(); err == nil {
		defer own.Close()
		all, _, err := hookorder.List(link.QueryOptions{Target: own.FD(), Attach: ebpf.AttachSkLookup}, 0)
		for _, p := range all {
			if err == nil {
				add("sk_lookup", p)
			}
		}
	}
	slices.SortFunc(out, func(a, b Hooked) int { return strings.Compare(a.Hook+a.Program, b.Hook+b.Program) })
	return out
}

// ownTables begin with this: weir's tables are not the operator's.
const ownTables = "weir"

// readRules reads the nftables rules of the calling thread's namespace; nil: there are none.
func readRules() (*Rules, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, err
	}
	var out Rules
	for _, chain := range chains {
		if strings.HasPrefix(chain.Table.Name, ownTables) {
			continue
		}
		table := familyName(chain.Table.Family) + " " + chain.Table.Name
		if !slices.Contains(out.Tables, table) {
			out.Tables = append(out.Tables, table)
		}
		rules, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return nil, err
		}
		out.Count += len(rules)
		if slices.ContainsFunc(rules, limitsUDP) {
			out.Limits = append(out.Limits, table+" "+chain.Name)
		}
	}
	slices.Sort(out.Tables)
	slices.Sort(out.Limits)
	if len(out.Tables) == 0 {
		return nil, nil
	}
	return &out, nil
}

// limitsUDP reports whether a rule limits the rate of UDP: it compares a protocol with UDP's and has a limit.
func limitsUDP(r *nftables.Rule) bool {
	udp, limit := false, false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Cmp:
			udp = udp || len(e.Data) == 1 && e.Data[0] == unix.IPPROTO_UDP
		case *expr.Limit, *expr.Dynset:
			limit = true
		}
	}
	return udp && limit
}

func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyINet:
		return "inet"
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyBridge:
		return "bridge"
	case nftables.TableFamilyNetdev:
		return "netdev"
	}
	return fmt.Sprintf("family %d", f)
}
