// SPDX-License-Identifier: Apache-2.0

// Package audit compares, for each prefix, the repair computed by FRR's isisd with zebra's and the kernel's routes,
// weir's data path and weir's plan. FRR shows backups that never reach the kernel's forwarding table (FRR issue
// 15589), because the kernel has no place for them. Traffic then waits for the routing protocol after all. FRR's
// other IGP for IPv6, ospf6d, computes no backups.
package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/internal/dump"
)

// NextHop is a next hop of a route or a backup.
type NextHop struct {
	Interface string     `json:"interface"`
	Gateway   netip.Addr `json:"gateway"`
	Labels    string     `json:"labels,omitempty"` // MPLS, as printed by isisd: 16103/16102
}

// Row describes one prefix with a backup of isisd or in a path of weir.
type Row struct {
	Prefix  netip.Prefix `json:"prefix"`
	Backup  []NextHop    `json:"isisd_backup"`
	Zebra   bool         `json:"in_zebra"`     // zebra has backup next hops for it
	Kernel  bool         `json:"in_kernel"`    // the kernel has a route using one of the backups, beside or after the primary
	Route   bool         `json:"kernel_route"` // the kernel has any route to it
	Weir    []Installed  `json:"in_weir"`
	Planned []Planned    `json:"planned"`
}

// Installed holds the repairs of one of weir's paths for a prefix, for the link of the kernel's route.
type Installed struct {
	Path     string                `json:"path"`
	Link     string                `json:"interface"`
	Attached bool                  `json:"attached"` // the program is attached to the interface
	Shadow   bool                  `json:"shadow,omitempty"`
	Repairs  []protect.RepairState `json:"repairs"`            // best first
	Problems []string              `json:"problems,omitempty"` // why the path's other repairs are not in force
}

// InForce reports whether packets would be rerouted if the link failed now.
func (i Installed) InForce() bool { return i.Attached && !i.Shadow && len(i.Repairs) > 0 }

// Planned is weir's repair of one failure on the way to the prefix.
type Planned struct {
	Failure  string   `json:"failure"`
	Out      string   `json:"out"`
	Segments []string `json:"segments"`
}

// Report is the audit of one router.
type Report struct {
	Router    string `json:"router"`
	Rows      []Row  `json:"prefixes"`
	InZebra   int    `json:"in_zebra"`
	InKernel  int    `json:"in_kernel"`
	InWeir    int    `json:"in_weir"`   // prefixes rerouted by weir after a failure now
	Unplanned int    `json:"unplanned"` // prefixes without a repair of weir
}

// Vtysh runs commands in the router's daemons.
type Vtysh func(commands ...string) (string, error)

// Local runs vtysh on this machine. dir is the directory of the daemons' sockets, "" for vtysh's default.
func Local(dir string) Vtysh {
	return func(commands ...string) (string, error) {
		var args []string
		if dir != "" {
			args = append(args, "--vty_socket", dir, "--config_dir", dir)
		}
		for _, c := range commands {
			args = append(args, "-c", c)
		}
		out, err := exec.Command("vtysh", args...).Output()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return "", fmt.Errorf("vtysh -c %q: %w: %.200s%.200s", commands, err, out, exit.Stderr)
		}
		if err != nil {
			return "", fmt.Errorf("ask FRR: %w: is the Debian package frr installed?", err)
		}
		return string(out), nil
	}
}

// Topology reads the network from isisd.
func Topology(v Vtysh) (*topo.Network, error) {
	text, err := v("show isis hostname", "show isis neighbor detail", "show isis database detail")
	if err != nil {
		return nil, err
	}
	return topo.Read("isisd's database", []byte(text))
}

// Run audits the router of this network namespace. paths are weir's paths.
func Run(v Vtysh, n *topo.Network, o plan.Options, paths []protect.PathState) (*Report, error) {
	if n.Self == "" {
		return nil, errors.New("the topology does not name this router: read isisd's database")
	}
	text, err := v("show isis route backup")
	if err != nil {
		return nil, err
	}
	backups, err := parseBackups(text)
	if err != nil {
		return nil, err
	}
	if text, err = v("show ipv6 route json"); err != nil {
		return nil, err
	}
	zebra, err := parseZebra([]byte(text))
	if err != nil {
		return nil, err
	}
	a, err := plan.Ask(n, plan.Question{Node: n.Self, Options: o})
	if err != nil {
		return nil, err
	}
	r := &Report{Router: n.Self, Rows: []Row{}}
	for _, b := range withPaths(backups, paths) {
		routes, err := routesTo(b.prefix)
		if err != nil {
			return nil, err
		}
		r.add(Row{Prefix: b.prefix, Backup: b.hops, Zebra: zebra[b.prefix], Planned: planned(n, a, b.prefix),
			Route: len(routes) > 0, Kernel: uses(routes, b.hops), Weir: installed(routes, b.prefix, paths)})
	}
	return r, nil
}

func (r *Report) add(row Row) {
	if row.Zebra {
		r.InZebra++
	}
	if row.Kernel {
		r.InKernel++
	}
	if slices.ContainsFunc(row.Weir, Installed.InForce) {
		r.InWeir++
	}
	if len(row.Planned) == 0 {
		r.Unplanned++
	}
	r.Rows = append(r.Rows, row)
}

// withPaths adds the prefixes of weir's paths without a backup of isisd.
func withPaths(all []backup, paths []protect.PathState) []backup {
	for _, p := range paths {
		for _, prefix := range p.Prefixes {
			if prefix.Addr().Is6() && !slices.ContainsFunc(all, func(b backup) bool { return b.prefix == prefix }) {
				all = append(all, backup{prefix: prefix, hops: []NextHop{}})
			}
		}
	}
	return all
}

type backup struct {
	prefix netip.Prefix
	hops   []NextHop
}

// parseBackups parses the IPv6 tables of "show isis route backup". A line without a prefix is another next hop of the
// prefix above.
func parseBackups(text string) (out []backup, err error) {
	inside := false
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		line := s.Text()
		if strings.Contains(line, "routing table:") {
			inside = strings.Contains(line, "IPv6")
			continue
		}
		f := strings.Fields(line)
		if !inside || len(f) < 3 || f[0] == "Prefix" || strings.HasPrefix(f[0], "---") {
			continue
		}
		if p, err := netip.ParsePrefix(f[0]); err == nil {
			if len(f) < 5 {
				return nil, fmt.Errorf("isisd's backup routes: %q has %d columns, want prefix, metric, interface, next hop and labels", line, len(f))
			}
			out = append(out, backup{prefix: p.Masked()})
			f = f[2:]
		}
		gateway, err := netip.ParseAddr(f[1])
		if err != nil || len(out) == 0 {
			continue // a local route has none
		}
		hop := NextHop{Interface: f[0], Gateway: gateway}
		if len(f) > 2 && f[2] != "-" {
			hop.Labels = f[2]
		}
		last := &out[len(out)-1]
		last.hops = append(last.hops, hop)
	}
	return slices.DeleteFunc(out, func(b backup) bool { return len(b.hops) == 0 }), nil
}

// parseZebra returns the prefixes with backup next hops in zebra.
func parseZebra(data []byte) (map[netip.Prefix]bool, error) {
	var routes map[string][]struct {
		Protocol string            `json:"protocol"`
		Backup   []json.RawMessage `json:"backupNexthops"`
	}
	if err := json.Unmarshal(data, &routes); err != nil {
		return nil, fmt.Errorf("zebra's routes: %w", err)
	}
	out := map[netip.Prefix]bool{}
	for text, entries := range routes {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("zebra's routes: %w", err)
		}
		for _, e := range entries {
			out[p] = out[p] || len(e.Backup) > 0
		}
	}
	return out, nil
}

// hop is a next hop of a kernel route.
type hop struct {
	link    string
	gateway netip.Addr
}

// routesTo returns the next hops of the kernel's routes to a prefix.
func routesTo(prefix netip.Prefix) (out []hop, err error) {
	dst := &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), 128)}
	routes, err := dump.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
	if err != nil {
		return nil, fmt.Errorf("the kernel's routes to %s: %w", prefix, err)
	}
	for _, r := range routes {
		hops := r.MultiPath
		if len(hops) == 0 {
			hops = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}}
		}
		for _, h := range hops {
			gateway, _ := netip.AddrFromSlice(h.Gw)
			name := ""
			if link, err := netlink.LinkByIndex(h.LinkIndex); err == nil { // else it was removed meanwhile
				name = link.Attrs().Name
			}
			out = append(out, hop{name, gateway})
		}
	}
	return out, nil
}

// uses reports whether routes use one of the backups, as another next hop or with a higher metric.
func uses(routes []hop, backups []NextHop) bool {
	return slices.ContainsFunc(routes, func(r hop) bool {
		return slices.ContainsFunc(backups, func(b NextHop) bool { return r.link == b.Interface && r.gateway == b.Gateway })
	})
}

// installed returns weir's repairs for a prefix at the links of the kernel's routes. Of a link's paths, the one with
// the longest covering prefix applies, else the one without prefixes.
func installed(routes []hop, prefix netip.Prefix, paths []protect.PathState) []Installed {
	best := map[string]*protect.PathState{}
	length := map[string]int{}
	for i := range paths {
		p := &paths[i]
		bits := -1
		for _, has := range p.Prefixes {
			if has.Bits() <= prefix.Bits() && has.Contains(prefix.Addr()) {
				bits = max(bits, has.Bits())
			}
		}
		if bits < 0 && len(p.Prefixes) > 0 {
			continue
		}
		if now, ok := length[p.Device]; !ok || bits > now {
			best[p.Device], length[p.Device] = p, bits
		}
	}
	out := []Installed{}
	for _, r := range routes {
		if p := best[r.link]; p != nil {
			delete(best, r.link) // once per link
			out = append(out, Installed{p.Name, p.Device, p.Attached, p.Shadow, p.Repairs, p.Problems})
		}
	}
	return out
}

// planned returns weir's useful repairs for a prefix, with the prefix's nearest announcers as destinations.
func planned(n *topo.Network, a *plan.Answer, prefix netip.Prefix) []Planned {
	owners := a.Planner.Announcers(n.Node(n.Self), prefix)
	out := []Planned{}
	for _, r := range a.Repairs {
		if slices.Contains(owners, r.Repair.Destination) && a.Planner.Carries(r.Plan, r.Repair, prefix) {
			out = append(out, Planned{r.Failure, r.Out, r.Segments})
		}
	}
	return out
}
