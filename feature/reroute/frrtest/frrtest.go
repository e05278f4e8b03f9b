// SPDX-License-Identifier: Apache-2.0

// Package frrtest runs real FRR routers in a test's network namespaces.
package frrtest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// folder is Debian's directory of FRR's daemons.
const folder = "/usr/lib/frr"

// Need skips the test if a daemon is not installed.
func Need(t testing.TB, daemons ...string) {
	t.Helper()
	nstest.NeedRoot(t)
	for _, d := range append(daemons, "zebra") {
		if _, err := os.Stat(filepath.Join(folder, d)); err != nil {
			t.Skipf("need: tool %s (Debian package frr)", d)
		}
	}
}

// Router is one router.
type Router struct {
	Name string
	NS   *netns.Handle
	Home string // directory of configurations and sockets
	t    testing.TB
	pids map[string]int
}

// Start starts zebra and the daemons with their configurations. They end with the test. All but zebra get the
// arguments, with {home} replaced by Router.Home.
func Start(t testing.TB, ns *netns.Handle, name string, configs map[string]string, arguments ...string) *Router {
	t.Helper()
	// Daemons run as user frr and need access; directories of package testing are closed.
	home, err := os.MkdirTemp("", "weir-frr-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	if err := os.Chmod(home, 0o777); err != nil {
		t.Fatal(err)
	}
	r := &Router{Name: name, NS: ns, Home: home, t: t, pids: map[string]int{}}
	r.write("vtysh.conf", "") // vtysh complains without it
	daemons := []string{"zebra"}
	for d := range configs {
		if d != "zebra" {
			daemons = append(daemons, d)
		}
	}
	slices.Sort(daemons[1:]) // zebra first: the others connect to it
	for _, d := range daemons {
		r.write(d+".conf", "hostname "+name+"\n"+configs[d])
		if d == "zebra" {
			r.start(d)
			continue
		}
		r.start(d, arguments...)
	}
	return r
}

func (r *Router) write(name, text string) {
	if err := os.WriteFile(filepath.Join(r.Home, name), []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
}

func (r *Router) start(daemon string, arguments ...string) {
	file := func(ending string) string { return filepath.Join(r.Home, daemon+ending) }
	out, err := os.Create(file(".out"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer out.Close()
	c := exec.Command(filepath.Join(folder, daemon), "-f", file(".conf"), "-i", file(".pid"), "-z", filepath.Join(r.Home, "zserv"),
		"--vty_socket", r.Home, "-P", "0", "--log", "stdout")
	for _, a := range arguments {
		c.Args = append(c.Args, strings.ReplaceAll(a, "{home}", r.Home))
	}
	c.Stdout, c.Stderr = out, out
	if err := r.NS.Do(c.Start); err != nil {
		r.t.Fatalf("start %s: %v", daemon, err)
	}
	r.pids[daemon] = c.Process.Pid
	r.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if r.t.Failed() {
			said, _ := os.ReadFile(file(".out"))
			r.t.Logf("%s of %s said: %.2000s", daemon, r.Name, said)
		}
	})
	socket := file(".vty")
	// The socket exists a moment before it accepts connections.
	nstest.Eventually(r.t, func() error {
		vty, err := net.Dial("unix", socket)
		if err != nil {
			return fmt.Errorf("%s of %s does not answer: %w", daemon, r.Name, err)
		}
		return vty.Close()
	})
}

// Signal sends a signal to a daemon.
func (r *Router) Signal(daemon string, s syscall.Signal) {
	r.t.Helper()
	if err := syscall.Kill(r.pids[daemon], s); err != nil {
		r.t.Fatalf("%s to %s of %s: %v", s, daemon, r.Name, err)
	}
}

// Vtysh runs commands on the router and returns the output.
func (r *Router) Vtysh(commands ...string) string {
	r.t.Helper()
	args := []string{"--vty_socket", r.Home, "--config_dir", r.Home}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out, err := exec.Command("vtysh", args...).CombinedOutput()
	if err != nil {
		r.t.Fatalf("vtysh %q: %v: %.500s", commands, err, out)
	}
	return string(out)
}

// Net is a network of routers with IS-IS and OSPFv3.
type Net struct {
	OnlyISIS bool // no OSPFv3
	NoLabels bool // no MPLS segment routing, unsupported by some kernels, and so no TI-LFA
	t        testing.TB
	names    []string
	spaces   map[string]*netns.Handle
	ports    map[string][]Port
	subnets  int
}

// Port is an interface of a router.
type Port struct {
	Name      string
	Metric    int
	Broadcast bool // a LAN for the routing protocols, though with two members only
}

// NewNet creates the namespaces of routers.
func NewNet(t testing.TB, names ...string) *Net {
	n := &Net{t: t, names: names, spaces: map[string]*netns.Handle{}, ports: map[string][]Port{}}
	for i, name := range names {
		ns := nstest.NewNetns(t)
		n.spaces[name] = ns
		err := ns.Do(func() error {
			for _, f := range []string{"net/ipv6/conf/all/forwarding", "net/ipv4/ip_forward"} {
				if err := os.WriteFile("/proc/sys/"+f, []byte("1"), 0); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		nstest.Address(t, ns, "lo", netip.PrefixFrom(Loopback(i), 128))
	}
	return n
}

// Loopback returns the address of router number i, from 0.
func Loopback(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:ff::%x", i+1)) }

// Cable connects two routers by ports.
func (n *Net) Cable(a string, pa Port, b string, pb Port) {
	n.t.Helper()
	n.subnets++
	nstest.Cable(n.t, n.spaces[a], pa.Name, n.spaces[b], pb.Name)
	for i, p := range []struct{ router, port string }{{a, pa.Name}, {b, pb.Name}} {
		nstest.Address(n.t, n.spaces[p.router], p.port,
			netip.MustParsePrefix(fmt.Sprintf("fd00:%x::%x/64", n.subnets, i+1)),
			netip.MustParsePrefix(fmt.Sprintf("10.77.%d.%d/24", n.subnets, i+1)))
	}
	n.ports[a], n.ports[b] = append(n.ports[a], pa), append(n.ports[b], pb)
}

// Start starts the routers, with TI-LFA on every link.
func (n *Net) Start() []*Router {
	n.t.Helper()
	var out []*Router
	for i, name := range n.names {
		configs := map[string]string{"isisd": n.isisd(i, name), "ospf6d": n.ospf6d(i, name)}
		if n.OnlyISIS {
			delete(configs, "ospf6d")
		}
		out = append(out, Start(n.t, n.spaces[name], name, configs))
	}
	return out
}

func (n *Net) isisd(i int, name string) string {
	var b strings.Builder
	b.WriteString("interface lo\n ipv6 router isis 1\n isis passive\n")
	for _, p := range n.ports[name] {
		fmt.Fprintf(&b, "interface %s\n ip router isis 1\n ipv6 router isis 1\n isis metric %d\n isis hello-interval 1\n isis csnp-interval 1\n isis psnp-interval 1\n", p.Name, p.Metric)
		if !p.Broadcast {
			b.WriteString(" isis network point-to-point\n")
		}
		if !p.Broadcast && !n.NoLabels {
			b.WriteString(" isis fast-reroute ti-lfa\n")
		}
	}
	// The router's name comes last: with it isisd generates its first LSP, and a second one after the interval set at
	// that moment.
	fmt.Fprintf(&b, `router isis 1
 is-type level-2-only
 metric-style wide
 topology ipv6-unicast
 lsp-gen-interval 1
 spf-interval 1
 net 49.0000.0000.0000.%04x.00
`, i+1)
	if !n.NoLabels {
		fmt.Fprintf(&b, " mpls-te on\n mpls-te router-address 10.255.0.%d\n segment-routing on\n segment-routing prefix %s/128 index %d\n", i+1, Loopback(i), i+1)
	}
	return b.String()
}

func (n *Net) ospf6d(i int, name string) string {
	var b strings.Builder
	b.WriteString("interface lo\n ipv6 ospf6 area 0.0.0.0\n")
	for _, p := range n.ports[name] {
		fmt.Fprintf(&b, "interface %s\n ipv6 ospf6 area 0.0.0.0\n ipv6 ospf6 hello-interval 1\n ipv6 ospf6 dead-interval 5\n ipv6 ospf6 cost %d\n", p.Name, p.Metric)
		if !p.Broadcast {
			b.WriteString(" ipv6 ospf6 network point-to-point\n")
		}
	}
	fmt.Fprintf(&b, "router ospf6\n ospf6 router-id 10.255.0.%d\n", i+1)
	return b.String()
}
