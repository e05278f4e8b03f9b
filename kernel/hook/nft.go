// SPDX-License-Identifier: Apache-2.0

// Package hook attaches programs to hooks without links: nftables rules, routes of SRv6 segments, sockets and reuseport
// groups.
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

// NFT runs a socket filter program on every IPv4 and IPv6 packet at an nftables hook, through xt_bpf. It drops packets
// for which the program returns 0. It uses two rules in a table of their own: the first returns passed packets, the
// second drops the rest. The order matters: nft cannot print the xt_bpf match. A ruleset saved and loaded with nft loses
// the match, and its table then passes everything, not drops everything. There is no link: the rules stay until they are
// removed or the ruleset is flushed. The methods run in the network namespace.
type NFT struct {
	Table    string // family inet; the table holds no foreign rules
	Hook     kernel.InetHook
	Priority int32 // priority of the chain among all at the hook; the lowest runs first
}

// NFTMatch is the need of [NFT].
var NFTMatch = kernel.Need{Name: "nftables with xt_bpf", Since: "4.10", Optional: true,
	For:    "hook: nft",
	Remedy: "load or build the modules nf_tables, nft_compat and xt_bpf (CONFIG_NF_TABLES_INET, CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_MATCH_BPF), or use hook: netfilter or tcx",
	Probe:  probeNFT}

// nftMatch is the name of the xt_bpf match.
const nftMatch = "bpf"

// nftChain is the name of the table's only chain.
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

// Attach makes the rules run the program pinned at path, in one transaction: a packet meets the old rules or the new
// ones. The pin is not needed afterwards. note is stored as the comment of the rule.
func (a NFT) Attach(path, note string) error {
	info, err := xtBPFPinned(path)
	if err == nil {
		err = a.attach(info, note)
	}
	if err != nil {
		return fmt.Errorf("attach to %s: %w", a, explainNFT(err))
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
		// In the same chain: a packet in it continues with its old rules.
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

// find returns the current chain, or nil if the table is missing. For a table without the chain it returns a chain
// without a hook.
func (a NFT) find(c *nftables.Conn) (*nftables.Chain, error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
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
		return nil, fmt.Errorf("list chains: %w", err)
	}
	for _, ch := range chains {
		if ch.Table.Name == a.Table && ch.Name == nftChain {
			return ch, nil
		}
	}
	return &nftables.Chain{Name: nftChain, Table: a.table()}, nil
}

// Note returns the note stored by Attach. ok is false if the rules are missing or changed, or if the chain has another
// hook or priority.
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
		return "", false, nil // loaded from nft's listing, without the match
	}
	note, ok = userdata.GetString(rules[0].UserData, userdata.TypeComment)
	return note, ok, nil
}

// Detach removes the table. A missing table is not an error.
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
		return fmt.Errorf("remove %s: %w", a, explainNFT(err))
	}
	kernel.Step("nft:detached")
	return nil
}

// xtBPFInfo is the size of struct xt_bpf_info_v1 in linux/netfilter/xt_bpf.h: u16 mode, u16 number of classic
// instructions, s32 descriptor, 512 bytes of instructions or path, and the kernel's own pointer.
const xtBPFInfo = 2 + 2 + 4 + 512 + 8

func xtBPFPinned(path string) (xt.InfoAny, error) {
	if len(path) > 511 {
		return nil, fmt.Errorf("the pin root is too long: xt_bpf accepts paths of up to 511 bytes, and %s has %d", path, len(path))
	}
	b := make(xt.Unknown, xtBPFInfo)
	binary.NativeEndian.PutUint16(b, 1) // XT_BPF_MODE_PATH_PINNED
	copy(b[8:], path)
	return &b, nil
}

// xtBPFClassic is a classic program of one instruction. It returns 0.
func xtBPFClassic() xt.InfoAny {
	b := make(xt.Unknown, xtBPFInfo)
	binary.NativeEndian.PutUint16(b[2:], 1)
	binary.NativeEndian.PutUint16(b[8:], unix.BPF_RET|unix.BPF_K)
	return &b
}

// probeNFT creates such a table in an empty namespace.
func probeNFT() error {
	err := netns.InNew(func() error {
		return NFT{Table: "weir_probe", Hook: kernel.Input}.attach(xtBPFClassic(), "probe")
	})
	return kernel.ExplainProbe(explainNFT(err))
}

// explainNFT adds the meaning of an nf_tables error.
func explainNFT(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: %w (nf_tables has no match bpf, or the pinned program is gone)", kernel.ErrUnsupported, err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w: %w", kernel.ErrUnsupported, err)
	}
	return err
}
