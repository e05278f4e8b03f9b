// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// lease is how long the fast program believes that its table is the kernel's routes. Who keeps it so renews the lease; should
// that process stand still, packets take the kernel's way again, and the egress program's.
const lease = 2 * time.Second

// mostRoutes is how many routes the table is made for.
const mostRoutes = 1 << 20

// fast is the program at the interfaces where packets come in, while a link is down. Nothing of it is pinned: it goes with the
// process that keeps its table.
type fast struct {
	ns    *netns.Handle
	pins  *kernel.Opened
	whole whole
	c     *kernel.Collection
	table *table.Table
	links []kernel.Link
	why   string // it does not run
	valid bool
}

// startFast loads the program, fills its table and attaches it. Where it would do other than the kernel does it is not
// attached, and why says so.
func startFast(ns *netns.Handle, pins *kernel.Opened, w whole) (_ *fast, err error) {
	f := &fast{ns: ns, pins: pins, whole: w}
	if f.why, err = obstacle(ns, w); err != nil || f.why != "" {
		return f, err
	}
	if f.c, err = loadOver(pins.Maps, protectProgRerouteIngress); err != nil {
		return nil, err
	}
	m, err := table.Of(f.c.Maps, "fast")
	if err == nil {
		f.table, err = table.Open(m)
	}
	if err == nil {
		err = f.learn()
	}
	if err == nil {
		err = f.attach()
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *fast) close() {
	for _, l := range f.links {
		l.Close()
	}
	if f.table != nil {
		f.table.Close()
	}
	if f.c != nil {
		f.c.Close()
	}
}

// suspend has packets take the kernel's way until [fast.learn].
func (f *fast) suspend() {
	f.valid = false
	f.until(0)
}

func (f *fast) until(t uint64) {
	if f.c != nil {
		_ = f.c.Variables[protectVarFastUntil].Set(t) // the map is there as long as the program
	}
}

// extend renews the lease.
func (f *fast) extend() {
	if f.valid {
		f.until(monotonic() + uint64(lease))
	}
}

// monotonic is CLOCK_MONOTONIC in ns.
func monotonic() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it does not fail
	return uint64(t.Nano())
}

// learn fills the table with what the kernel's routes are now.
func (f *fast) learn() error {
	if f.table == nil {
		return nil
	}
	f.suspend()
	var entries []table.Entry
	err := f.ns.Do(func() (err error) {
		entries, err = f.mirror()
		return err
	})
	if err != nil {
		return err
	}
	if err := f.table.Replace(entries); errors.Is(err, table.ErrFull) {
		f.why = "there are too many routes"
		return nil
	} else if err != nil {
		return fmt.Errorf("filling the table of routes: %w", err)
	}
	f.valid = true
	f.extend()
	return nil
}

// attach has the program run on every interface from which the kernel forwards.
func (f *fast) attach() error {
	return f.ns.Do(func() error {
		all, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("listing interfaces: %w", err)
		}
		for _, l := range all {
			a := l.Attrs()
			helper := strings.HasPrefix(a.Name, helperDevice) && a.HardwareAddr.String() == hereMAC.String()
			if a.EncapType != "ether" || a.RawFlags&unix.IFF_UP == 0 || a.MasterIndex != 0 || helper || !forwards(a.Name) {
				continue
			}
			ln, err := kernel.TCX{Ifindex: a.Index, Device: a.Name}.Attach(f.c.Programs[protectProgRerouteIngress])
			if err != nil {
				return err
			}
			f.links = append(f.links, ln)
		}
		return nil
	})
}

func forwards(device string) bool { return setting("ipv6/conf/"+device+"/forwarding") == "1" }

// setting reads a variable of the namespace of the calling thread; empty: there is none.
func setting(name string) string {
	b, err := os.ReadFile("/proc/sys/net/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// obstacle says why the fast program would do other than the kernel does, which does more with a packet than look up its route.
func obstacle(ns *netns.Handle, w whole) (why string, err error) {
	for _, p := range w.Paths {
		if p.Slow {
			return "path " + p.Name + " says slow", nil
		}
	}
	if !tcx() {
		return "this kernel has no tcx", nil
	}
	err = ns.Do(func() error {
		for _, look := range []func() (string, error){forwardsNothing, filters, rules, policies, bySource} {
			if why, err = look(); err != nil || why != "" {
				return err
			}
		}
		return nil
	})
	return why, err
}

func forwardsNothing() (string, error) {
	if setting("ipv6/conf/all/forwarding") != "1" {
		return "the host does not forward IPv6", nil
	}
	return "", nil
}

// filters looks for chains that forwarded packets meet.
func filters() (string, error) {
	if b, err := os.ReadFile("/proc/net/ip6_tables_names"); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		return "there are ip6tables rules", nil
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
		// netdev's are at a device, before routing or behind it.
		inet := ch.Table.Family == nftables.TableFamilyIPv6 || ch.Table.Family == nftables.TableFamilyINet
		if ch.Table.Family == nftables.TableFamilyNetdev || inet && *ch.Hooknum != *nftables.ChainHookInput && *ch.Hooknum != *nftables.ChainHookOutput {
			return fmt.Sprintf("nftables chain %s %s sees forwarded packets", ch.Table.Name, ch.Name), nil
		}
	}
	return "", nil
}

// rules looks for rules beside the two that every namespace has.
func rules() (string, error) {
	all, err := netlink.RuleList(netlink.FAMILY_V6)
	if err != nil {
		return "", fmt.Errorf("listing rules: %w", err)
	}
	for _, r := range all {
		if r.Table != unix.RT_TABLE_LOCAL && r.Table != unix.RT_TABLE_MAIN {
			return fmt.Sprintf("there is an ip -6 rule of priority %d", r.Priority), nil
		}
	}
	return "", nil
}

func policies() (string, error) {
	all, err := netlink.XfrmPolicyList(netlink.FAMILY_V6)
	if err == nil && len(all) > 0 {
		return "there are IPsec policies", nil
	}
	return "", nil // a kernel without IPsec has none
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
	if len(all) > mostRoutes {
		return "there are too many routes", nil
	}
	for _, m := range all {
		if len(m) > 2 && m[2] != 0 {
			return "there are routes by source address", nil
		}
	}
	return "", nil
}

// repairOf finds the repair of a destination behind a protected link; 0: none.
type repairOf struct {
	byDefault uint32
	prefixes  map[netip.Prefix]uint32
}

// of is the repair of the longest prefix that covers p.
func (r repairOf) of(p netip.Prefix) uint32 {
	for bits := p.Bits(); bits >= 0; bits-- {
		if id := r.prefixes[netip.PrefixFrom(p.Addr(), bits).Masked()]; id != 0 {
			return id
		}
	}
	return r.byDefault
}

// passedOver says that the kernel does not use routes to a link without a carrier: it sends packets elsewhere by itself then.
func passedOver(index int) bool {
	l, err := netlink.LinkByIndex(index)
	return err != nil || setting("ipv6/conf/"+l.Attrs().Name+"/ignore_routes_with_linkdown") == "1" || setting("ipv6/conf/all/ignore_routes_with_linkdown") == "1"
}

// repairsOf reads the repairs of every protected link, by its number.
func (f *fast) repairsOf() (map[int]repairOf, error) {
	i := &installer{repairs: f.pins.Maps[pinRepairs], paths: f.pins.Maps[pinPaths], prefixes: f.pins.Maps[pinPrefixes], have: map[uint32]protectRerouteRepair{}}
	paths, prefixes, err := i.read()
	if err != nil {
		return nil, err
	}
	out, slots := map[int]repairOf{}, map[uint32]int{}
	for slot, p := range paths {
		if passedOver(int(p.Ifindex)) {
			continue
		}
		out[int(p.Ifindex)] = repairOf{p.Repair, map[netip.Prefix]uint32{}}
		slots[slot] = int(p.Ifindex)
	}
	for key, id := range prefixes {
		a := netip.AddrFrom16(key.Addr)
		if index, ok := slots[key.Slot]; ok && !a.Is4In6() {
			out[index].prefixes[netip.PrefixFrom(a, int(key.Bits)-32)] = id
		}
	}
	return out, nil
}
