// SPDX-License-Identifier: Apache-2.0

// Package hook attaches programs where the kernel has no link: to rules of nftables, routes of SRv6 segments, sockets and
// groups of sockets.
package hook

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// NFT asks a program of type socket filter, by xt_bpf, about every IPv4 and IPv6
// packet at a hook point of nftables, and drops those for which it returns 0. Two
// rules do it, in a table of their own beside whatever the user has: one returns
// what the program passes, the next drops the rest. In this order, because nft
// prints a rule without the match that it has no words for: whoever saves a ruleset
// and loads it again gets a table that passes everything, and not one that drops
// everything. There is no link: the rules stay until they are taken away, or somebody
// flushes the ruleset. The methods run in the network namespace.
type NFT struct {
	Table    string // of family inet; nobody else's rules are in it
	Hook     kernel.InetHook
	Priority int32 // of the chain, among all at the hook; the lowest runs first
}

// NFTMatch is the need of [NFT].
var NFTMatch = kernel.Need{Name: "nftables with xt_bpf", Since: "4.10", Optional: true,
	For:    "hook: nft",
	Remedy: "load or build the modules nf_tables, nft_compat and xt_bpf (CONFIG_NF_TABLES_INET, CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_MATCH_BPF), or use hook: netfilter or tcx",
	Probe:  probeNFT}

// nftMatch is the name of the match of xt_bpf.
const nftMatch = "bpf"

// nftChain is the name of the only chain of a table.
const nftChain = "filter"

func (a NFT) String() string {
	return fmt.Sprintf("nftables table inet %s, %s, priority %d", a.Table, a.Hook, a.Priority)
}

func (a NFT) table() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: a.Table}
}

func (a NFT) chain(t *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{Name: nftChain, Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookRef(nftables.ChainHook(a.Hook)), Priority: nftables.ChainPriorityRef(nftables.ChainPriority(a.Priority)), Policy: &policy}
}

// Attach makes the rules ask the program that is pinned at path, in one
// transaction: a packet meets what was there before or this. The pin is not
// needed afterwards. note is kept with the rule, as its comment.
func (a NFT) Attach(path, note string) error {
	info, err := xtBPFPinned(path)
	if err == nil {
		err = a.attach(info, note)
	}
	if err != nil {
		return fmt.Errorf("attaching to %s: %w", a, explainNFT(err))
	}
	kernel.Step("nft:attached")
	return nil
}

func (a NFT) attach(info xt.InfoAny, note string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	have, err := a.find(c)
	if err != nil {
		return err
	}
	t := a.table()
	ch := a.chain(t)
	switch {
	case have == nil:
		c.AddTable(t)
		c.AddChain(ch)
	case sameBase(have, ch):
		// In the chain itself: a packet that is in it goes on with the rules it came for.
		c.FlushChain(ch)
	default:
		c.DelTable(t)
		c.AddTable(t)
		c.AddChain(ch)
	}
	c.AddRule(&nftables.Rule{Table: t, Chain: ch, UserData: userdata.AppendString(nil, userdata.TypeComment, note),
		Exprs: []expr.Any{&expr.Match{Name: nftMatch, Rev: 1, Info: info}, &expr.Verdict{Kind: expr.VerdictReturn}}})
	c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}})
	return c.Flush()
}

func sameBase(have, want *nftables.Chain) bool {
	return have.Hooknum != nil && have.Priority != nil && *have.Hooknum == *want.Hooknum && *have.Priority == *want.Priority
}

// find returns the chain as it is, nil where the table is not there. A table
// without the chain gives a chain at no hook.
func (a NFT) find(c *nftables.Conn) (*nftables.Chain, error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("listing tables: %w", err)
	}
	there := false
	for _, t := range tables {
		there = there || t.Name == a.Table
	}
	if !there {
		return nil, nil //nolint:nilnil // neither a table nor an error
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("listing chains: %w", err)
	}
	for _, ch := range chains {
		if ch.Table.Name == a.Table && ch.Name == nftChain {
			return ch, nil
		}
	}
	return &nftables.Chain{Name: nftChain, Table: a.table()}, nil
}

// Note returns what Attach noted with the rules; ok is false where they are not
// there, or are no more what Attach made of them, or the chain is at another hook
// point or priority.
func (a NFT) Note() (note string, ok bool, err error) {
	c, err := nftables.New()
	if err != nil {
		return "", false, err
	}
	ch, err := a.find(c)
	if err != nil || ch == nil || !sameBase(ch, a.chain(a.table())) {
		return "", false, err
	}
	rules, err := c.GetRules(a.table(), ch)
	if err != nil || len(rules) != 2 || len(rules[0].Exprs) != 2 {
		return "", false, err
	}
	if m, is := rules[0].Exprs[0].(*expr.Match); !is || m.Name != nftMatch {
		return "", false, nil // loaded again from what nft had listed
	}
	note, ok = userdata.GetString(rules[0].UserData, userdata.TypeComment)
	return note, ok, nil
}

// Detach takes the table away. One that is gone is no error.
func (a NFT) Detach() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	have, err := a.find(c)
	if err == nil && have != nil {
		c.DelTable(a.table())
		err = c.Flush()
	}
	if err != nil {
		return fmt.Errorf("removing %s: %w", a, explainNFT(err))
	}
	kernel.Step("nft:detached")
	return nil
}

// xtBPFInfo is struct xt_bpf_info_v1 of linux/netfilter/xt_bpf.h: u16 mode, u16
// number of classic instructions, s32 descriptor, 512 bytes of instructions or
// path, and the kernel's own pointer.
const xtBPFInfo = 2 + 2 + 4 + 512 + 8

func xtBPFPinned(path string) (xt.InfoAny, error) {
	if len(path) > 511 {
		return nil, fmt.Errorf("the pin root is too long: xt_bpf takes paths of 511 bytes, and %s has %d", path, len(path))
	}
	b := make(xt.Unknown, xtBPFInfo)
	binary.NativeEndian.PutUint16(b, 1) // XT_BPF_MODE_PATH_PINNED
	copy(b[8:], path)
	return &b, nil
}

// xtBPFClassic is a program of one instruction that returns 0.
func xtBPFClassic() xt.InfoAny {
	b := make(xt.Unknown, xtBPFInfo)
	binary.NativeEndian.PutUint16(b[2:], 1)
	binary.NativeEndian.PutUint16(b[8:], unix.BPF_RET|unix.BPF_K)
	return &b
}

// probeNFT makes such a table in a namespace that nothing else is in.
func probeNFT() error {
	err := netns.InNew(func() error {
		return NFT{Table: "weir_probe", Hook: kernel.Input}.attach(xtBPFClassic(), "probe")
	})
	return kernel.ExplainProbe(explainNFT(err))
}

// explainNFT names what an error of nf_tables stands for.
func explainNFT(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: %w (nf_tables has no match bpf, or the pinned program is gone)", kernel.ErrUnsupported, err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w: %w", kernel.ErrUnsupported, err)
	}
	return err
}
