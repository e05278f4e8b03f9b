// SPDX-License-Identifier: Apache-2.0

// Package inventory reads what runs on a host: programs with listening sockets, routing daemons with their BFD
// neighbours, interfaces, nftables rules, and BPF programs at hooks. It reads this process's network namespace and all
// named ones.
package inventory

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/weir-project/weir/internal/netns"
)

// Host is the inventory of a host. Its order depends only on its contents.
type Host struct {
	Namespaces []Namespace // this process's own first, the others by name
	Programs   []Program   // sorted by namespace, name and listens
	Unseen     []string    // parts hidden from this user, with the remedy
}

// Namespace is a network namespace.
type Namespace struct {
	Name       string // "" for this process's own
	Interfaces []Interface
	Routing    []string // names of routing daemons: zebra, bfdd, bird
	FRR        *FRR     // nil: no bfdd
	Rules      *Rules   // nil: no nftables rules of others
	Hooked     []Hooked
}

// Interface is a network interface.
type Interface struct {
	Name     string
	Loopback bool
	Addrs    []netip.Prefix
}

// Program is a group of equal daemons: instances of one program with the same listens in one namespace.
type Program struct {
	Name      string // name of the process: nfacctd
	Service   string // unique name for a service of weir.yaml
	Netns     string // "" for this process's own
	Role      Role
	Listens   []Listen
	Instances []Instance
}

// Instance is a daemon with its children.
type Instance struct {
	PID       int    // the topmost process
	Unit      string // systemd service
	Container string // name of the container
	Cgroup    string // from the root of cgroup2
	PIDFile   string // file with the PID, see [PIDFileSources]
	Sockets   int    // maximum number of sockets at one listen
}

// Listen is an address with a listening socket.
type Listen struct {
	Proto string // tcp or udp
	Local netip.AddrPort
	Only6 bool // [::] without IPv4
}

// String returns the listen as written in weir.yaml.
func (l Listen) String() string {
	proto := l.Proto
	switch a := l.Local.Addr(); {
	case a == netip.IPv6Unspecified() && l.Only6:
		proto += "6"
	case a == netip.IPv6Unspecified():
		return fmt.Sprintf("%s :%d", proto, l.Local.Port())
	}
	return proto + " " + l.Local.String()
}

// Local reports whether only this host can reach the program.
func (p Program) Local() bool {
	return !slices.ContainsFunc(p.Listens, func(l Listen) bool { return !l.Local.Addr().IsLoopback() })
}

// Has reports whether the program listens with a protocol, tcp or udp.
func (p Program) Has(proto string) bool {
	return slices.ContainsFunc(p.Listens, func(l Listen) bool { return l.Proto == proto })
}

// Sockets returns the maximum number of sockets of one instance at one listen.
func (p Program) Sockets() (n int) {
	for _, i := range p.Instances {
		n = max(n, i.Sockets)
	}
	return n
}

// String names the instance for people: its unit, container or process.
func (i Instance) String() string {
	switch {
	case i.Unit != "":
		return "unit " + i.Unit
	case i.Container != "":
		return "container " + i.Container
	}
	return fmt.Sprintf("process %d", i.PID)
}

// Options are parameters of [Gather].
type Options struct {
	// Workload returns the unit and the container in the path of a cgroup.
	Workload func(cgroup string) (unit, container string)
}

// Gather reads the host. Hidden or unreadable parts are in Unseen.
func Gather(ctx context.Context, o Options) (Host, error) {
	g := gatherer{Options: o}
	own, err := netns.Current()
	if err != nil {
		return Host{}, err
	}
	defer own.Close()
	g.processes()
	if os.Geteuid() != 0 {
		g.unseen("processes of other users: run weir init as root")
	}
	g.namespace(ctx, "", own)
	names, err := netns.Names()
	if err != nil {
		g.unseen("named network namespaces: %v", err)
	}
	for _, name := range names {
		h, err := netns.Open(name)
		if err != nil {
			g.unseen("network namespace %s: %v", name, err)
			continue
		}
		if !h.Same(own) {
			g.namespace(ctx, name, h)
		}
		h.Close()
	}
	slices.SortFunc(g.host.Programs, func(a, b Program) int {
		return cmp.Or(cmp.Compare(a.Netns, b.Netns), cmp.Compare(a.Name, b.Name), slices.CompareFunc(a.Listens, b.Listens, compareListens))
	})
	nameServices(g.host.Programs)
	return g.host, nil
}

type gatherer struct {
	Options
	host Host
	all  map[int]process
}

func (g *gatherer) unseen(format string, a ...any) {
	if text := fmt.Sprintf(format, a...); !slices.Contains(g.host.Unseen, text) {
		g.host.Unseen = append(g.host.Unseen, text)
	}
}

// namespace adds one namespace.
func (g *gatherer) namespace(ctx context.Context, name string, h *netns.Handle) {
	n := Namespace{Name: name}
	label := cmp.Or(name, "(own)")
	in := h.Do
	if name == "" {
		in = func(f func() error) error { return f() } // needs no rights
	}
	err := in(func() error {
		listeners, err := readListeners()
		if err != nil {
			g.unseen("sockets of network namespace %s: %v", label, err)
		}
		g.addPrograms(name, listeners)
		if n.Interfaces, err = readInterfaces(); err != nil {
			g.unseen("interfaces of network namespace %s: %v", label, err)
		}
		if n.Rules, err = readRules(); err != nil {
			g.unseen("nftables rules of network namespace %s: %v", label, err)
		}
		n.Hooked = readHooked(n.Interfaces)
		return nil
	})
	if err != nil {
		g.unseen("network namespace %s: %v", label, err)
		return
	}
	for _, p := range g.all {
		if p.netns == h.Inode() && roleOf(p.name, nil) == Routing && !slices.Contains(n.Routing, p.name) {
			n.Routing = append(n.Routing, p.name)
		}
		if p.netns == h.Inode() && p.name == "bfdd" {
			n.FRR, err = readFRR(ctx, p.pid)
			if err != nil {
				g.unseen("BFD neighbours of bfdd (process %d): %v", p.pid, err)
			}
		}
	}
	slices.Sort(n.Routing)
	g.host.Namespaces = append(g.host.Namespaces, n)
}

func readInterfaces() (out []Interface, err error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		one := Interface{Name: i.Name, Loopback: i.Flags&net.FlagLoopback != 0}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				one.Addrs = append(one.Addrs, p)
			}
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b Interface) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// nameServices gives each program a unique service name: its name, then also its namespace, its port, a number.
func nameServices(all []Program) {
	taken := map[string]bool{}
	for i := range all {
		p := &all[i]
		name := validName(p.Name)
		if taken[name] && p.Netns != "" {
			name = validName(p.Name + "-" + p.Netns)
		}
		if taken[name] {
			name = validName(fmt.Sprintf("%s-%d", name, p.Listens[0].Local.Port()))
		}
		for n, base := 2, name; taken[name]; n++ {
			name = fmt.Sprintf("%s-%d", base, n)
		}
		taken[name], p.Service = true, name
	}
}

// validName replaces the characters forbidden in names of services.
func validName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' {
			return r
		}
		return '_'
	}, name)
	return cmp.Or(strings.TrimLeft(name, "-_"), "service")
}
