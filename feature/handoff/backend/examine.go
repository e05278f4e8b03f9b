// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"net/netip"
	"os"
	"strings"

	"github.com/google/nftables"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/conntrack"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// trackLoose is the sysctl that makes conntrack pick up established connections.
const trackLoose = "/proc/sys/net/netfilter/nf_conntrack_tcp_loose"

// examine checks for obstacles to moves in the network namespaces of backends' agents, for weir doctor.
func examine(r *kernel.Root) (out []feature.Finding, err error) {
	all, _, err := quarantine.Store.All(r) // State reports unreadable ones
	for _, inst := range all {
		ns, e := inst.Netns()
		if errors.Is(e, netns.ErrGone) {
			continue
		} else if e != nil {
			err = errors.Join(err, e)
			continue
		}
		err = errors.Join(err, ns.Do(func() error { out = append(out, examineTracking("conntrack of netns "+inst.Scope)...); return nil }))
		ns.Close()
	}
	return out, err
}

// examineTracking checks the conntrack of this network namespace.
func examineTracking(object string) (out []feature.Finding) {
	loose, err := os.ReadFile(trackLoose)
	if err != nil {
		return nil // no conntrack
	}
	if strings.TrimSpace(string(loose)) == "0" {
		text := "nf_conntrack_tcp_loose is 0: conntrack marks packets of arrived sessions invalid, and rules dropping them (ct state invalid) end the sessions"
		if drops, err := conntrack.InvalidDrops([]*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookInput}, []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}); err == nil && len(drops) > 0 {
			text += ": " + strings.Join(drops, "; ")
		}
		out = append(out, feature.Finding{Object: object, Text: text,
			Remedy: "sysctl net.netfilter.nf_conntrack_tcp_loose=1, or a notrack rule for the services' addresses"})
	}
	nobody := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	if errors.Is(conntrack.Delete(nobody, nobody, 0), conntrack.ErrNone) {
		out = append(out, feature.Finding{Object: object, Text: "this kernel has conntrack without ctnetlink: a returning session meets its old entry, and its packets may become invalid",
			Remedy: "modprobe nf_conntrack_netlink, or sysctl net.netfilter.nf_conntrack_tcp_be_liberal=1"})
	}
	return out
}

// examineAgent checks an agent's connections.
func examineAgent(object string, s Status) (out []feature.Finding) {
	switch {
	case s.LBRejects != "":
		out = append(out, feature.Finding{Object: object, Text: "the load balancer rejects it, and sends it no new flows: " + s.LBRejects,
			Remedy: "fix the cause: the agent registers again by itself"})
	case !s.LB:
		out = append(out, feature.Finding{Object: object, Text: "its agent is not connected to a load balancer: no session can move, and new flows arrive only if the load balancer checks the backend itself",
			Remedy: "check weir serve there, handoff.backend.lb, and the log of weir serve here"})
	}
	if !s.Keeper {
		out = append(out, feature.Finding{Object: object, Text: "the keeper does not answer its agent: no session can move",
			Remedy: "run weir serve with handoff.keeper, or weir handoff keep; handoff.backend.keeper names its socket"})
	}
	return out
}
