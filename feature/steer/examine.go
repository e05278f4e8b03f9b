// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// oneSourceAfter is the number of datagrams from a single source that makes doctor suspect a proxy. A single exporter
// in a lab sends fewer.
const oneSourceAfter = 1000

// examine finds causes that make steering useless or blind, above all devices in the path that make all routers look
// like one source.
func examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, err := state.Read(ctx, r)
	if err != nil {
		return nil, err
	}
	st.ExplainEmpty(ctx)
	out := append(st.Failures(), feature.UnreadFindings(st.Unreadable)...)
	for _, o := range st.Outdated {
		out = append(out, feature.Finding{Object: fmt.Sprintf("engine %s of %s", o.Engine, o.Netns), Text: "its program is of weir " + o.Version + ": " + o.String(),
			Remedy: "run weir upgrade or weir apply; no packet is lost"})
	}
	for i := range st.Services {
		s := &st.Services[i]
		add := func(text, remedy string) {
			out = append(out, feature.Finding{Object: s.Name, Text: text, Remedy: remedy})
		}
		if s.Problem != "" && !s.Fails() {
			add(s.Problem, "")
		}
		for _, slot := range s.Slots {
			if slot.Occupant != "" && slot.Reason != "" {
				add(fmt.Sprintf("slot %d has %s, but its configured member is %s: %s", slot.Slot, slot.Occupant, slot.Member, slot.Reason),
					"correct the member in weir.yaml, or start it: weir serve then admits it")
				continue
			}
			if slot.Occupant != "" {
				add(fmt.Sprintf("slot %d has %s, but its configured member is %s", slot.Slot, slot.Occupant, slot.Member),
					fmt.Sprintf("weir steer admit %s --slot %d admits the configured member", s.Name, slot.Slot))
			}
			if slot.Reason != "" && !slot.Withdrawn && s.Record.Service.Member(slot.Slot) != nil {
				remedy := ""
				if slot.Admitted() {
					remedy = "correct bound of the member in weir.yaml, or let it open this socket; then run weir apply"
				}
				add(slot.Describe(), remedy)
			}
		}
		s.ExamineOverrides(ctx, add)
		examineDevices(s, add)
		if devices, _, err := s.Devices(r); err == nil {
			examinePmacct(s, ctx, devices, add)
			if a, ok := oneSource(devices); ok {
				s.Collapsed = true
				add(fmt.Sprintf("all its traffic comes from %s: a proxy, NAT or tee hides the routers, and one slot gets everything", a),
					"preserve the routers' addresses: remove the proxy or the SNAT/masquerade rule, or use a transparent tee")
			}
		}
		examineNetns(s, add)
		s.ExamineGroups(r, add)
	}
	unserved, err := examineUnserved(&st, r)
	return append(out, unserved...), err
}

// examineDevices checks the devices file. weir serve keeps its current devices while the file is not valid.
func examineDevices(s *state.Service, add func(text, remedy string)) {
	if s.By != spec.ByDevice || s.DevicesFile == "" {
		return
	}
	if _, err := spec.LoadDevices(s.DevicesFile); err != nil && (os.Geteuid() == 0 || users.Has(unix.CAP_DAC_READ_SEARCH) || !errors.Is(err, os.ErrPermission)) {
		add(fmt.Sprintf("its devices file is rejected, the previous devices stay: %v", err), "correct the file: weir serve or weir apply reads it again")
	}
}

// oneSource reports whether all traffic came from one address.
func oneSource(devices []state.Device) (netip.Addr, bool) {
	if len(devices) != 1 {
		return netip.Addr{}, false
	}
	d := devices[0]
	return d.Address, d.UDP >= oneSourceAfter || d.Sessions > 1
}

// examineNetns looks for source NAT in the service's namespace. If this is not weir's own, it also looks for a userland
// proxy in weir's.
func examineNetns(s *state.Service, add func(text, remedy string)) {
	ns, err := s.OpenNetns()
	if err != nil {
		return
	}
	defer ns.Close()
	ns.Do(func() error {
		absent, err := service.NotLocal(s.Endpoints)
		if err != nil {
			add(err.Error(), "weir explain PACKET follows the routes of one packet")
		}
		for _, p := range absent {
			if p.IsSingleIP() {
				add(fmt.Sprintf("listen %s is not an address of this host: no packet to it reaches a socket", p.Addr()),
					fmt.Sprintf("ip address add %s dev lo, or correct listen", p))
			} else {
				add(fmt.Sprintf("listen %s contains no address of this host: no packet to it reaches a socket", p), fmt.Sprintf("ip route add local %s dev lo, or correct listen", p))
			}
		}
		for _, rule := range sourceNAT(nftables.ChainHookInput) {
			add("source addresses may be rewritten on input: "+rule, "exempt the service's traffic from that rule")
		}
		return nil
	})
	own, err := netns.Current()
	if err != nil {
		return
	}
	defer own.Close()
	if own.Same(ns) {
		return
	}
	if s.Collapsed { // otherwise these rules, present on every container host, concern other traffic
		for _, rule := range sourceNAT(nftables.ChainHookPostrouting) {
			add("source addresses are rewritten before the service's namespace: "+rule, "exempt the service's traffic from that rule")
		}
	}
	for _, ep := range s.Endpoints {
		for _, p := range portOwners(ep.Proto, ep.Port) {
			add(fmt.Sprintf("%s listens on port %d in front of the service's own network namespace: its members see that process's address, not the routers'", p, ep.Port),
				"give the members the host's network, route to their namespace, or turn the userland proxy off (dockerd: \"userland-proxy\": false)")
		}
	}
}

// sourceNAT lists this namespace's nftables rules at a hook that change source addresses, including iptables-nft rules.
func sourceNAT(hook *nftables.ChainHook) []string {
	c, err := nftables.New()
	if err != nil {
		return nil
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil
	}
	var out []string
	for _, ch := range chains {
		if ch.Hooknum == nil || *ch.Hooknum != *hook || ch.Type != nftables.ChainTypeNAT {
			continue
		}
		rules, err := c.GetRules(ch.Table, ch)
		if err != nil {
			continue
		}
		for _, r := range rules {
			if slices.ContainsFunc(r.Exprs, changesSource) {
				out = append(out, fmt.Sprintf("nft table %s, chain %s, handle %d", ch.Table.Name, ch.Name, r.Handle))
			}
		}
	}
	return out
}

func changesSource(e expr.Any) bool {
	switch e := e.(type) {
	case *expr.Masq:
		return true
	case *expr.NAT:
		return e.Type == expr.NATTypeSourceNAT
	case *expr.Target: // iptables-nft
		return e.Name == "SNAT" || e.Name == "MASQUERADE"
	}
	return false
}

// portOwners names the processes with a socket bound to a port in this namespace.
func portOwners(proto uint8, port uint16) []string {
	socks, err := engine.Bound(proto, port)
	if err != nil || len(socks) == 0 {
		return nil
	}
	var inodes []uint32
	for _, s := range socks {
		inodes = append(inodes, s.Inode)
	}
	var out []string
	for _, pids := range pidfd.Holders(inodes...) {
		for _, pid := range pids {
			if name := state.ProcessName(pid); !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	slices.Sort(out)
	return out
}

// examineUnserved finds services without a socket.
func examineUnserved(s *state.State, r *kernel.Root) (out []feature.Finding, err error) {
	if err := s.NoteUnserved(r); err != nil {
		return nil, err
	}
	for _, b := range s.Bound {
		for _, u := range b.Unserved {
			out = append(out, feature.Finding{Object: u.Service, Text: u.Text(b.Netns), Remedy: u.Remedy()})
		}
	}
	return out, nil
}
