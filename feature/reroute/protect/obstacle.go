// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/kernel"
)

// fastCheckInterval is the shortest time between checks of the fast program. Tests change it.
var fastCheckInterval = time.Second

// interfaces lists the interfaces. Tests make it fail.
var interfaces = dump.LinkList

// obstacle returns why the fast program would differ from the kernel's behaviour, or "". The fast program looks up a
// route and does nothing else, so it must bypass no filter or policy of the operator's. [forwardingInterfaces] checks
// the single interfaces.
func (f *fast) obstacle() (why string, err error) {
	for _, p := range f.spec.Paths {
		if p.Slow {
			return "path " + p.Name + " has slow: true", nil
		}
	}
	if !tcx() {
		return "this kernel has no tcx", nil
	}
	err = f.ns.Do(func() error {
		for _, look := range []func() (string, error){forwardsNothing, f.filters, rules, policies} {
			if why, err = look(); err != nil || why != "" {
				return err
			}
		}
		why, err = egress(f.pins)
		return err
	})
	return why, err
}

// forwardingInterfaces returns the interfaces with forwarding enabled, by index. Interfaces with tc filters behind
// the fast program are excluded and reported in aside. Programs of tcx run before it and do not matter.
func forwardingInterfaces() (at map[int]string, aside []string, err error) {
	all, err := interfaces()
	if err != nil {
		return nil, nil, fmt.Errorf("listing interfaces: %w", err)
	}
	at = map[int]string{}
	for _, l := range all {
		a := l.Attrs()
		helper := strings.HasPrefix(a.Name, helperDevice) && a.HardwareAddr.String() == hereMAC.String()
		if a.EncapType != "ether" || a.RawFlags&unix.IFF_UP == 0 || a.MasterIndex != 0 || helper || !forwards(a.Name) {
			continue
		}
		filters, err := dump.FilterList(l, netlink.HANDLE_MIN_INGRESS)
		switch {
		case err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENODEV):
			return nil, nil, fmt.Errorf("listing filters of %s: %w", a.Name, err)
		case len(filters) > 0:
			aside = append(aside, "tc filters see packets arriving by "+a.Name)
		default:
			at[a.Index] = a.Name
		}
	}
	return at, aside, nil
}

// egress looks for programs before weir's own at protected links.
func egress(pins *kernel.Opened) (string, error) {
	all, err := pins.Links()
	if err != nil {
		return "", err
	}
	for _, pin := range all {
		var index int
		if _, err := fmt.Sscanf(pin, linkPrefix+"%d", &index); err != nil {
			continue
		}
		ln, err := pins.Link(pin)
		if err != nil {
			continue // the link was removed meanwhile
		}
		before, _, err := kernel.TCX{Ifindex: index, Egress: true}.Around(ln)
		ln.Close()
		before = slices.DeleteFunc(before, func(name string) bool { return strings.Contains(name, links.LeaveProgram) })
		if err == nil && len(before) > 0 { // a removed interface has none
			return fmt.Sprintf("program %s precedes weir's at the egress of interface %d", before[0], index), nil
		}
	}
	return "", nil
}

// misplaced reports whether the attachments must change: interfaces or filters came or went, or a program behind this
// one misses its packets.
func (f *fast) misplaced(at map[int]string) bool {
	for p, ln := range f.links {
		if _, behind, err := p.Around(ln); at[p.Ifindex] != p.Device || err != nil || len(behind) > 0 {
			return true
		}
	}
	return len(at) != len(f.links)
}

// stays reports whether the program can stay as it is: attached at the same interfaces, or detached for the same
// reason. Checks take at most a twentieth of the caller's time, but one runs every five seconds at least. If a check
// fails, stays returns the error, and packets take the kernel's way until a check succeeds.
func (f *fast) stays() (stays bool, err error) {
	began := time.Now()
	if began.Before(f.next) {
		return true, f.unsure
	}
	defer func() {
		f.next = time.Now().Add(max(fastCheckInterval, min(20*time.Since(began), atLatest)))
		if f.unsure = err; err != nil {
			f.until(0)
		}
	}()
	obstacle, err := f.obstacle()
	if err != nil {
		return true, err
	}
	err = f.ns.Do(func() error {
		at, aside, err := forwardingInterfaces()
		if err != nil {
			return err
		}
		if why := f.because(obstacle, at, aside); why != "" {
			stays = why == f.reason
		} else {
			stays = f.reason == "" && slices.Equal(aside, f.bypassed) && !f.misplaced(at)
		}
		return nil
	})
	return stays || err != nil, err
}

// because picks one of several reasons. Equal arguments give the same reason, because a changing one would restart
// the program with each check.
func (f *fast) because(obstacle string, at map[int]string, aside []string) string {
	return cmp.Or(obstacle, f.routes, nowhere(at, aside))
}

// nowhere returns why no interface can have the program.
func nowhere(at map[int]string, aside []string) string {
	if len(at) > 0 || len(aside) == 0 {
		return ""
	}
	return aside[0]
}

// not lists the excluded interfaces with reasons, or why the program is detached.
func (f *fast) not() string { return cmp.Or(f.reason, strings.Join(f.bypassed, "; ")) }

func forwardsNothing() (string, error) {
	if setting("ipv6/conf/all/forwarding") != "1" {
		return "the host does not forward IPv6", nil
	}
	return "", nil
}

// filters looks for netfilter chains of forwarded packets.
func (f *fast) filters() (string, error) {
	if b, err := os.ReadFile("/proc/net/ip6_tables_names"); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		return "ip6tables rules exist", nil
	}
	programs, err := f.netfilter.Here(unix.NFPROTO_IPV6)
	if err != nil {
		return "", err
	}
	for _, p := range programs {
		if p.Hook != kernel.Input && p.Hook != kernel.Output {
			return fmt.Sprintf("a BPF program of netfilter sees forwarded packets, at %s", p.Hook), nil
		}
	}
	c, err := nftables.New()
	if err != nil {
		return "", nil //nolint:nilerr // no nf_tables, no chains
	}
	all, err := c.ListChains()
	if err != nil {
		return "", nil //nolint:nilerr // as above
	}
	for _, ch := range all {
		if ch.Hooknum == nil {
			continue
		}
		// Chains of netdev hook a device, before or after routing.
		inet := ch.Table.Family == nftables.TableFamilyIPv6 || ch.Table.Family == nftables.TableFamilyINet
		if ch.Table.Family == nftables.TableFamilyNetdev || inet && *ch.Hooknum != *nftables.ChainHookInput && *ch.Hooknum != *nftables.ChainHookOutput {
			return fmt.Sprintf("nftables chain %s %s sees forwarded packets", ch.Table.Name, ch.Name), nil
		}
	}
	return "", nil
}

func policies() (string, error) {
	if all, err := netlink.XfrmPolicyList(netlink.FAMILY_V6); err == nil && len(all) > 0 {
		return "IPsec policies exist", nil
	}
	return "", nil // a kernel without IPsec
}

// rules looks for rules other than weir's and the two of every namespace.
func rules() (string, error) {
	all, err := dump.RuleList(netlink.FAMILY_V6)
	if err != nil {
		return "", fmt.Errorf("listing rules: %w", err)
	}
	for _, r := range all {
		if !usual(r) && !kept(r) { // only packets without a route reach weir's rules; the fast program ignores those
			return fmt.Sprintf("an ip -6 rule of priority %d exists", r.Priority), nil
		}
	}
	return "", nil
}

// usual reports whether a rule is one of the two default rules for all packets.
func usual(r netlink.Rule) bool {
	for priority, table := range map[int]int{0: unix.RT_TABLE_LOCAL, 32766: unix.RT_TABLE_MAIN} {
		o := netlink.NewRule()
		o.Priority, o.Table, o.Family, o.Protocol = priority, table, r.Family, r.Protocol
		if reflect.DeepEqual(*o, r) {
			return true
		}
	}
	return false
}

// bySource looks for routes by source address: rtm_src_len of linux/rtnetlink.h.
func bySource() (string, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	msg := nl.NewRtMsg()
	msg.Family = unix.AF_INET6
	req.AddData(msg)
	all, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil {
		return "", fmt.Errorf("listing routes: %w", err)
	}
	if len(all) > maxRoutes {
		return tooMany, nil
	}
	for _, m := range all {
		if len(m) > 2 && m[2] != 0 {
			return "routes by source address exist", nil
		}
	}
	return "", nil
}
