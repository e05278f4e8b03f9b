// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// The helper namespace answers packets too big for a repair. Each size has a veth pair, with a route back of that MTU
// behind it. The kernel there sends Packet Too Big and fragmentation needed, and fragments where permitted, by its
// usual code. A rule in the router's own namespace would also work, but slows every packet by a quarter.
const (
	helperName   = "weir-reroute-" // followed by the namespace's inode number
	helperDevice = "weir"          // followed by the size; the near end
	helperFar    = "to"            // followed by the size; the far end
	helperRoom   = 65535           // MTU of the pairs themselves
)

// Link and IP addresses of the pairs' ends. 192.0.0.8 is the source of ICMP from hosts without an IPv4 address (RFC
// 7600 section 4.8).
var (
	helperMAC  = net.HardwareAddr{0x02, 0x77, 0x65, 0x69, 0x72, 0x01} // as in protect.bpf.c
	hereMAC    = net.HardwareAddr{0x02, 0x77, 0x65, 0x69, 0x72, 0x02}
	helper4    = netip.MustParseAddr("192.0.0.8")
	hereVia    = netip.MustParseAddr("fe80::7765:6972")
	helperRule = 1000 // priority of the first rule, and the number of its table
)

// maxLearntPairs bounds the pairs for learnt sizes, because routers on the way may report many. Further sizes share
// the pair of a smaller size; its answers name a fitting size too.
const maxLearntPairs = 8

// pairSizes maps each needed size to the size of the answering pair.
func pairSizes(routes []route) map[int]int {
	learnt := map[int]bool{} // true: needed by learnt sizes only
	for _, r := range routes {
		for _, w := range r.ways {
			for _, size := range []int{int(w.Mtu - w.Len6), int(w.Mtu - w.Len4)} {
				before, known := learnt[size]
				learnt[size] = w.Flags&flagLearnt != 0 && (before || !known)
			}
		}
	}
	all := slices.Sorted(maps.Keys(learnt))
	told := slices.DeleteFunc(slices.Clone(all), func(size int) bool { return !learnt[size] })
	shares := map[int]bool{}
	if n := len(told); n > maxLearntPairs {
		for _, size := range told {
			shares[size] = true
		}
		for i := range maxLearntPairs {
			delete(shares, told[i*n/maxLearntPairs]) // the smallest is among them
		}
	}
	out, pair := map[int]int{}, 0
	for _, size := range all {
		if !shares[size] {
			pair = size
		}
		out[size] = pair
	}
	return out
}

// pairs returns the sizes of the needed pairs as keys.
func pairs(routes []route) map[int]int {
	out := map[int]int{} // → index of the near device, filled in later
	for _, size := range pairSizes(routes) {
		out[size] = 0
	}
	return out
}

// reconcileHelper creates the helper namespace and its pairs, and writes their devices into the routes.
func (s *instance) reconcileHelper(routes []route) error {
	sizes := pairs(routes)
	var source netip.Addr
	for _, r := range routes {
		for _, w := range r.ways {
			if w.source.IsValid() {
				source = w.source
			}
		}
	}
	if len(sizes) == 0 {
		if err := s.ns.Do(func() error { return dropDevices(sizes) }); err != nil {
			return err
		}
		dropHelper(s.inst.Scope)
		return nil
	}
	h, err := openHelper(s.inst.Scope)
	if err != nil {
		return err
	}
	defer h.Close()
	for size := range sizes {
		if sizes[size], err = s.pair(h, size, source); err != nil {
			return fmt.Errorf("creating the pair for packets of %d bytes: %w", size, err)
		}
	}
	of := pairSizes(routes)
	for _, r := range routes {
		for i := range r.ways {
			w := &r.ways[i]
			w.Slow6, w.Slow4 = uint32(sizes[of[int(w.Mtu-w.Len6)]]), uint32(sizes[of[int(w.Mtu-w.Len4)]])
		}
	}
	return nil
}

// dropUnused removes unneeded pairs. Call it only after no repair leads to them.
func (s *instance) dropUnused(routes []route) error {
	return s.ns.Do(func() error { return dropDevices(pairs(routes)) })
}

func openHelper(scope string) (*netns.Handle, error) {
	h, err := netns.Open(helperName + scope)
	if err != nil {
		// The name is missing, or left from a crash between the creation of the file and of the namespace.
		_ = netns.Delete(helperName + scope)
		h, err = netns.Create(helperName + scope)
	}
	if err != nil {
		return nil, err
	}
	err = h.Do(func() error {
		return errors.Join(sysctl("net/ipv6/conf/all/forwarding", "1"), sysctl("net/ipv4/ip_forward", "1"),
			sysctl("net/ipv4/conf/all/rp_filter", "0"), sysctl("net/ipv4/conf/default/rp_filter", "0"))
	})
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// dropHelper removes the name. The namespace ends with its last pair.
func dropHelper(scope string) { _ = netns.Delete(helperName + scope) }

func init() {
	kernel.OnSweep(func(i kernel.Instance) {
		if i == instanceKey(i.Scope) {
			dropHelper(i.Scope)
		}
	})
}

// dropOrphans removes the helper namespaces of deleted network namespaces. Lost pins leave them without an instance. The
// helper of another root's instance stays: it has a pair, and its router's namespace is there.
func dropOrphans() error {
	names, err := netns.Names()
	for _, name := range names {
		scope, is := strings.CutPrefix(name, helperName)
		if is && netns.Gone(scope, 0) && !hasPairs(name) {
			if e := netns.Delete(name); !errors.Is(e, unix.EPERM) { // weir serve may not unmount: a command of root does
				err = errors.Join(err, e)
			}
		}
	}
	return err
}

// hasPairs reports whether a helper namespace has far ends, or cannot be read. A file left without a namespace has none.
func hasPairs(name string) bool {
	h, err := netns.Open(name)
	if err != nil {
		return !errors.Is(err, netns.ErrNotNetns)
	}
	defer h.Close()
	has := true
	_ = h.Do(func() error {
		if all, err := dump.LinkList(); err == nil {
			has = slices.ContainsFunc(all, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, helperFar) })
		}
		return nil
	})
	return has
}

// pair creates or completes the pair for packets of at most size bytes. It returns the index of the near end.
func (s *instance) pair(h *netns.Handle, size int, source netip.Addr) (index int, err error) {
	name, far := helperDevice+strconv.Itoa(size), helperFar+strconv.Itoa(size)
	err = s.ns.Do(func() error {
		index, err = pairHere(h, name, far)
		return err
	})
	if err != nil {
		return 0, err
	}
	return index, h.Do(func() error { return pairThere(far, size, source) })
}

// pairHere creates the pair if it is missing and configures the near end.
func pairHere(h *netns.Handle, name, far string) (int, error) {
	l, err := netlink.LinkByName(name)
	if err == nil && h.Do(func() error { _, err := netlink.LinkByName(far); return err }) != nil {
		if l.Type() != "veth" || l.Attrs().HardwareAddr.String() != hereMAC.String() {
			return 0, fmt.Errorf("interface %s exists and is not weir's: rename it", name)
		}
		if err := netlink.LinkDel(l); err != nil { // its far end is in a helper namespace removed by hand
			return 0, err
		}
		err = unix.ENODEV
	}
	if err != nil {
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU, a.HardwareAddr, a.GSOMaxSegs = name, helperRoom, hereMAC, 1 // the pair splits GSO trains
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: far, PeerHardwareAddr: helperMAC, PeerMTU: helperRoom, PeerNamespace: netlink.NsFd(h.FD())})
		if err != nil {
			return 0, fmt.Errorf("creating the pair %s–%s: %w", name, far, err)
		}
		if l, err = netlink.LinkByName(name); err != nil {
			return 0, err
		}
	}
	// Fragments return on an interface without a route to their source. The source may be this host.
	filter := "0"
	if v, _ := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter"); strings.TrimSpace(string(v)) != "0" {
		filter = "2" // the kernel uses the greater of the two; 2 accepts any route
	}
	err = errors.Join(sysctl("net/ipv6/conf/"+name+"/accept_ra", "0"), sysctl("net/ipv6/conf/"+name+"/forwarding", "1"),
		sysctl("net/ipv6/conf/"+name+"/accept_dad", "0"), sysctl("net/ipv4/conf/"+name+"/rp_filter", filter),
		sysctl("net/ipv4/conf/"+name+"/accept_local", "1"), sysctl("net/ipv4/conf/"+name+"/forwarding", "1"), netlink.LinkSetUp(l))
	if err != nil {
		return 0, fmt.Errorf("setting up %s: %w", name, err)
	}
	route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: host(helper4), Scope: netlink.SCOPE_LINK, Priority: l.Attrs().Index}
	if err := netlink.RouteReplace(route); err != nil {
		return 0, fmt.Errorf("adding the route to %s: %w", helper4, err)
	}
	return l.Attrs().Index, nil
}

// pairThere configures the far end: its own table, with routes leading back.
func pairThere(far string, size int, source netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	addrs := []netip.Addr{helper4}
	if source.IsValid() {
		addrs = append(addrs, source)
	}
	for _, a := range addrs {
		if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: host(a), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("adding address %s: %w", a, err)
		}
	}
	l, err := netlink.LinkByName(far)
	if err != nil {
		return err
	}
	index := l.Attrs().Index
	err = errors.Join(sysctl("net/ipv6/conf/"+far+"/accept_dad", "0"), sysctl("net/ipv4/conf/"+far+"/rp_filter", "0"), netlink.LinkSetUp(l),
		netlink.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: hereVia.AsSlice(), HardwareAddr: hereMAC}))
	if err != nil {
		return fmt.Errorf("setting up %s: %w", far, err)
	}
	via := &netlink.Via{AddrFamily: unix.AF_INET6, Addr: hereVia.AsSlice()}
	all6, all4 := &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	for _, r := range []*netlink.Route{
		{LinkIndex: index, Dst: all6, Gw: hereVia.AsSlice(), Table: helperRule + size, MTU: size, MTULock: true},
		{LinkIndex: index, Dst: all4, Via: via, Table: helperRule + size, MTU: size, MTULock: true},
	} {
		if err := netlink.RouteReplace(r); err != nil {
			return fmt.Errorf("adding the route back: %w", err)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		if err := addRule(family, far, size); err != nil {
			return fmt.Errorf("adding the rule for %s: %w", far, err)
		}
	}
	return nil
}

// addRule routes packets from a device by its table. Errors made in the namespace have no input device, and return by
// the device of their cause. icmp_route_lookup looks them up with the device for IPv4, and without one for IPv6.
func addRule(family int, far string, size int) error {
	for _, iif := range []string{far, ""} {
		r := netlink.NewRule()
		r.Family, r.IifName, r.Table, r.Priority = family, iif, helperRule+size, helperRule+size
		if iif == "" {
			r.Priority += 100_000 // behind the others; any pair leads back
		}
		if err := netlink.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return nil
}

// dropDevices removes pairs of unwanted sizes.
func dropDevices(wanted map[int]int) error {
	all, err := dump.LinkList()
	if err != nil {
		return err
	}
	for _, l := range all {
		number, is := strings.CutPrefix(l.Attrs().Name, helperDevice)
		size, err := strconv.Atoi(number)
		if _, keep := wanted[size]; keep || !is || err != nil || l.Attrs().HardwareAddr.String() != hereMAC.String() {
			continue
		}
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("removing %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// sysctl sets a sysctl of the calling thread's namespace.
func sysctl(name, value string) error {
	return os.WriteFile("/proc/sys/"+name, []byte(value), 0)
}
