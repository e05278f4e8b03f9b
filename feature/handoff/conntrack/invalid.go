// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// stateInvalid is the bit of invalid packets in conntrack's state (linux/netfilter/nf_conntrack_common.h).
const stateInvalid = 1

// nfDrop is the verdict drop (linux/netfilter.h).
const nfDrop = 0

// InvalidDrops returns the nftables rules that drop packets in conntrack's state invalid, also rules of iptables-nft. It
// reads chains at the hooks, in the network namespace of the calling thread. It omits a rule below rules that accept
// packets from all of these addresses, and all rules if such packets are not tracked. It does not follow jumps.
func InvalidDrops(hooks []*nftables.ChainHook, from []netip.Addr) (out []string, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, err
	}
	untracked := map[netip.Addr]bool{}
	for _, chain := range chains {
		if chain.Hooknum == nil || !slices.ContainsFunc(hooks, func(h *nftables.ChainHook) bool { return *h == *chain.Hooknum }) {
			continue
		}
		seen := slices.DeleteFunc(slices.Clone(from), func(a netip.Addr) bool {
			return chain.Table.Family == nftables.TableFamilyIPv4 && !a.Is4() || chain.Table.Family == nftables.TableFamilyIPv6 && !a.Is6()
		})
		if len(seen) == 0 {
			continue
		}
		rules, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return nil, err
		}
		accepted := map[netip.Addr]bool{}
		for _, r := range rules {
			for _, a := range seen {
				if passes(r, a) {
					accepted[a] = true
				}
				if skips(r, a) {
					untracked[a] = true
				}
			}
			if len(accepted) < len(seen) && drops(c, r) {
				out = append(out, fmt.Sprintf("nft table %s, chain %s, handle %d", chain.Table.Name, chain.Name, r.Handle))
			}
		}
	}
	if len(untracked) == len(from) {
		return nil, nil
	}
	return out, nil
}

// drops reports whether a rule drops or rejects invalid packets: ct state invalid, or a verdict map of ct state.
func drops(c *nftables.Conn, r *nftables.Rule) bool {
	register, masked, invalid, dropped := uint32(0), false, false, false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Ct:
			if e.Key == expr.CtKeySTATE && !e.SourceRegister {
				register = e.Register
			}
		case *expr.Bitwise:
			masked = register != 0 && e.SourceRegister == register && word(e.Mask)&stateInvalid != 0
		case *expr.Cmp:
			if masked && e.Op == expr.CmpOpNeq && word(e.Data) == 0 || register != 0 && !masked && e.Op == expr.CmpOpEq && word(e.Data) == stateInvalid {
				invalid = true
			}
		case *expr.Lookup:
			if register == 0 || e.SourceRegister != register || e.Invert {
				continue
			}
			elements, err := c.GetSetElements(&nftables.Set{Table: r.Table, Name: e.SetName, ID: e.SetID, IsMap: e.IsDestRegSet})
			if err != nil {
				continue
			}
			for _, x := range elements {
				if word(x.Key) == stateInvalid {
					invalid = true
					dropped = dropped || e.IsDestRegSet && dropVerdict(x.Val)
				}
			}
		case *expr.Match: // iptables-nft: -m conntrack --ctstate INVALID
			invalid = invalid || matchesInvalid(e)
		case *expr.Verdict:
			dropped = dropped || e.Kind == expr.VerdictDrop
		case *expr.Reject:
			dropped = true
		case *expr.Target:
			dropped = dropped || e.Name == "REJECT"
		}
	}
	return invalid && dropped
}

// dropVerdict reports whether the value in a verdict map is drop. The library returns the attribute with the verdict's
// code (big endian).
func dropVerdict(value []byte) bool {
	return len(value) == 2*unix.NLA_HDRLEN && binary.BigEndian.Uint32(value[unix.NLA_HDRLEN:]) == nfDrop
}

// matchesInvalid reports whether a match of iptables-nft selects invalid packets.
func matchesInvalid(m *expr.Match) bool {
	var flags, inverted xt.ConntrackFlags
	var states uint16
	switch i := m.Info.(type) {
	case *xt.ConntrackMtinfo1:
		flags, inverted, states = xt.ConntrackFlags(i.MatchFlags), xt.ConntrackFlags(i.InvertFlags), uint16(i.StateMask)
	case *xt.ConntrackMtinfo2:
		flags, inverted, states = xt.ConntrackFlags(i.MatchFlags), xt.ConntrackFlags(i.InvertFlags), i.StateMask
	case *xt.ConntrackMtinfo3:
		flags, inverted, states = xt.ConntrackFlags(i.MatchFlags), xt.ConntrackFlags(i.InvertFlags), i.StateMask
	}
	return flags&xt.ConntrackState != 0 && inverted&xt.ConntrackState == 0 && states&stateInvalid != 0
}

// passes reports whether a rule accepts packets from an address.
func passes(r *nftables.Rule, a netip.Addr) bool {
	return about(r, a) && slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		v, ok := e.(*expr.Verdict)
		return ok && v.Kind == expr.VerdictAccept
	})
}

// skips reports whether a rule excepts packets from an address from conntrack.
func skips(r *nftables.Rule, a netip.Addr) bool {
	return about(r, a) && slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		t, ok := e.(*expr.Target) // iptables-nft
		_, own := e.(*expr.Notrack)
		return own || ok && (t.Name == "NOTRACK" || t.Name == "CT")
	})
}

// about reports whether a rule compares source addresses with a, with a prefix of a, or with a set.
func about(r *nftables.Rule, a netip.Addr) bool {
	bytes, offset := a.AsSlice(), uint32(12)
	if a.Is6() {
		offset = 8
	}
	loaded, mask := false, []byte(nil)
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Payload:
			loaded, mask = e.Base == expr.PayloadBaseNetworkHeader && e.Offset == offset && int(e.Len) <= len(bytes), nil
		case *expr.Bitwise:
			mask = e.Mask
		case *expr.Cmp:
			if !loaded || e.Op != expr.CmpOpEq || len(e.Data) > len(bytes) {
				continue
			}
			want := slices.Clone(bytes[:len(e.Data)])
			for i := range min(len(want), len(mask)) {
				want[i] &= mask[i]
			}
			if slices.Equal(want, e.Data) {
				return true
			}
		case *expr.Lookup:
			if loaded && !e.Invert {
				return true
			}
		}
	}
	return false
}

// word reads a register of 32 bits, in the byte order of the host.
func word(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}
