// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// lease limits how long the fast program trusts its table of routes. [fast.extend] renews the lease. If this process
// stalls, packets fall back to the kernel's routing and the egress program.
const lease = 2 * time.Second

// maxRoutes is the capacity of the table.
const maxRoutes = 1 << 20

const tooMany = "too many routes"

// fast is the ingress program, attached while a link is down. Nothing of it is pinned: it ends with the process,
// because the process keeps its table up to date.
type fast struct {
	ns    *netns.Handle
	pins  *kernel.Opened
	spec  scopeSpec
	c     *kernel.Collection
	table *table.Table
	links map[kernel.TCX]kernel.Link
	valid bool

	netfilter *kernel.NetfilterSeen

	unsure   error     // the last check failed, so it is unknown whether the program may run
	reason   string    // why the program is not attached
	routes   string    // the part of reason found in the routes by the last learn
	bypassed []string  // interfaces without the program, with reasons
	next     time.Time // time of the next check
}

// startFast loads the program, fills its table and attaches it. Where it would differ from the kernel's behaviour it
// stays detached, and reason explains why.
func startFast(ns *netns.Handle, pins *kernel.Opened, w scopeSpec, seen *kernel.NetfilterSeen) (_ *fast, err error) {
	f := &fast{ns: ns, pins: pins, spec: w, netfilter: seen, links: map[kernel.TCX]kernel.Link{}, next: time.Now().Add(fastCheckInterval)}
	if f.reason, err = f.obstacle(); err != nil || f.reason != "" {
		return f, err
	}
	if f.c, err = loadOver(pins.Maps, bpf.ProtectProgRerouteIngress); err != nil {
		return nil, err
	}
	m, err := table.Find(f.c.Maps, "fast")
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

// hurry attaches the fast program while a protected link is down. The program only shortens the packets' way. While
// it cannot run, or this is unknown, the kernel and the egress program do the work, and links are followed as before.
func (w *watcher) hurry() {
	down := false
	for _, l := range w.links {
		down = down || l.protected && w.words.Get(l.slot).Reasons() != 0
	}
	if w.fast != nil && down {
		stays, err := w.fast.stays()
		if stays {
			w.unsure(err)
			w.fast.extend()
			return
		}
	}
	if w.fast != nil {
		w.fast.close()
		w.fast = nil
	}
	began := time.Now()
	if !down || !w.due.IsZero() || began.Before(w.fastAfter) {
		return
	}
	f, err := startFast(w.ns, w.pins, w.scopeSpec, &w.netfilter)
	w.unsure(err)
	if err != nil {
		w.fastAfter = time.Now().Add(max(fastCheckInterval, min(20*time.Since(began), atLatest)))
		return
	}
	w.fast = f
	w.log.Info("packets are rerouted at ingress", "interfaces", len(f.links), "except", f.not())
}

// unsure logs once why the fast program does not run although nothing known forbids it.
func (w *watcher) unsure(err error) {
	why := ""
	if err != nil {
		why = err.Error()
	}
	if why != "" && w.unknown == "" {
		w.log.Warn("packets are not rerouted at ingress, but after the kernel's routing", "err", why)
	}
	w.unknown = why
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

// suspend sends packets the kernel's way until the next [fast.learn].
func (f *fast) suspend() {
	f.valid = false
	f.until(0)
}

func (f *fast) until(t uint64) {
	if f.c != nil {
		_ = f.c.Variables[bpf.ProtectVarFastUntil].Set(t) // the map exists as long as the program
	}
}

// extend renews the lease.
func (f *fast) extend() {
	if f.valid && f.unsure == nil {
		f.until(kernel.Monotonic() + uint64(lease))
	}
}

// learn fills the table from the kernel's current routes.
func (f *fast) learn() error {
	if f.table == nil {
		return nil
	}
	f.suspend()
	var entries []table.Entry
	err := f.ns.Do(func() (err error) {
		if f.routes, err = bySource(); err == nil && f.routes == "" {
			entries, err = f.mirror()
		}
		return err
	})
	if err != nil || f.routes != "" {
		return err
	}
	if err := f.table.Replace(entries); errors.Is(err, table.ErrFull) {
		f.routes = tooMany
		return nil
	} else if err != nil {
		return fmt.Errorf("filling the table of routes: %w", err)
	}
	f.valid = true
	f.extend()
	return nil
}

// attach attaches the program behind all others at every interface with IPv6 forwarding.
func (f *fast) attach() error {
	return f.ns.Do(func() error {
		at, aside, err := forwardingInterfaces()
		if err != nil {
			return err
		}
		if f.bypassed, f.reason = aside, f.because("", at, aside); f.reason != "" {
			return nil
		}
		for _, index := range slices.Sorted(maps.Keys(at)) {
			p := kernel.TCX{Ifindex: index, Device: at[index]}
			ln, err := p.Attach(f.c.Programs[bpf.ProtectProgRerouteIngress])
			if err != nil {
				return err
			}
			f.links[p] = ln
		}
		return nil
	})
}

func forwards(device string) bool { return setting("ipv6/conf/"+device+"/forwarding") == "1" }

// setting reads a sysctl of the calling thread's namespace. It returns "" if there is none.
func setting(name string) string {
	b, err := os.ReadFile("/proc/sys/net/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// repairOf maps the destinations behind a protected link to repair numbers; 0 is no repair.
type repairOf struct {
	byDefault uint32
	prefixes  map[netip.Prefix]uint32
}

// of returns the repair of the longest prefix covering p.
func (r repairOf) of(p netip.Prefix) uint32 {
	for bits := p.Bits(); bits >= 0; bits-- {
		if id := r.prefixes[netip.PrefixFrom(p.Addr(), bits).Masked()]; id != 0 {
			return id
		}
	}
	return r.byDefault
}

// passedOver reports whether the kernel ignores routes over the link while it has no carrier. The kernel itself then
// uses another route.
func passedOver(index int) bool {
	l, err := netlink.LinkByIndex(index)
	return err != nil || setting("ipv6/conf/"+l.Attrs().Name+"/ignore_routes_with_linkdown") == "1" || setting("ipv6/conf/all/ignore_routes_with_linkdown") == "1"
}

// readRepairs reads the repairs of every protected link, by interface index.
func (f *fast) readRepairs() (map[int]repairOf, error) {
	i := newInstaller(f.pins)
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
