// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
)

// Router is a real router: FRR's bgpd with its BMP module. A second bgpd is its BGP neighbour with
// announced routes. An IPFIX exporter reports the traffic between the two. All of its telemetry comes from
// one source address.
type Router struct {
	Name       string
	Namespace  string     // of the router
	Neighbour  string     // namespace of the BGP neighbour
	Addr       netip.Addr // source of its telemetry
	Local, Far netip.Addr // the BGP session's ends
	Interface  string     // towards the neighbour; watched by the exporter
	Collector  netip.AddrPort
	Routes     int    // announced by the neighbour
	Exporter   string // "pmacctd" or "softflowd"
	// Also lists further collectors. Each has its own BMP session, with the same routes.
	Also []netip.AddrPort

	exporter *lab.Process
}

// bgpPort is the port of both ends, each in its own namespace.
const bgpPort = "179"

// StartBGP starts both ends of the BGP session. BMP comes up with the route to the collectors, and should
// not come up before BGP. FRR would report the end of a session without a begin.
func (r *Router) StartBGP(e *lab.Env) error {
	dir := filepath.Join(e.Dir, r.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := r.startBGP(e, dir, "peer", r.Neighbour, r.Far, r.peerConfig(), ""); err != nil {
		return err
	}
	return r.startBGP(e, dir, "router", r.Namespace, r.Local, r.routerConfig(), "bmp")
}

// StartExporter starts the IPFIX exporter.
func (r *Router) StartExporter(e *lab.Env) error {
	dir := filepath.Join(e.Dir, r.Name)
	if r.Exporter == "softflowd" {
		return r.startSoftflowd(e, dir)
	}
	return r.startPmacctd(e, dir)
}

// Missing returns the programs of a router not installed here.
func (r *Router) Missing() []string {
	var missing []string
	for _, program := range []string{"bgpd", r.Exporter} {
		if _, err := lab.Find(program); err != nil {
			missing = append(missing, program)
		}
	}
	return missing
}

func (r *Router) startBGP(e *lab.Env, dir, role, namespace string, listen netip.Addr, config, module string) error {
	home := filepath.Join(dir, role)
	if err := os.MkdirAll(home, 0o777); err != nil {
		return err
	}
	// vtysh complains without a configuration.
	if err := os.WriteFile(filepath.Join(home, "vtysh.conf"), nil, 0o644); err != nil {
		return err
	}
	conf := filepath.Join(home, "bgpd.conf")
	if err := os.WriteFile(conf, []byte(config), 0o644); err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(home, "out"))
	if err != nil {
		return err
	}
	defer out.Close()
	// -Z: no zebra, -n: no kernel routes, -S: no change of user; its sockets and files are in our
	// directory.
	args := []string{"-Z", "-S", "-n", "-f", conf, "-i", filepath.Join(home, "pid"), "-z", filepath.Join(home, "zserv"),
		"--vty_socket", home, "-P", "0", "-l", listen.String(), "-p", bgpPort}
	if module != "" {
		args = append(args, "-M", module)
	}
	_, err = e.Start(lab.Command{Namespace: namespace, Path: "bgpd", Args: args, Dir: home, Output: out})
	return err
}

func (r *Router) routerConfig() string {
	return strings.NewReplacer("SELF", r.Addr.String(), "LOCAL", r.Local.String(), "FAR", r.Far.String()).Replace(`hostname router
router bgp 64600
 bgp router-id SELF
 no bgp ebgp-requires-policy
 no bgp default ipv4-unicast
 neighbor FAR remote-as 64601
 neighbor FAR update-source LOCAL
 neighbor FAR timers connect 1
 neighbor FAR passive
 address-family ipv4 unicast
  neighbor FAR activate
 exit-address-family
`) + r.targets()
}

// targets returns a group of BMP targets for each collector.
func (r *Router) targets() string {
	var b strings.Builder
	for i, c := range append([]netip.AddrPort{r.Collector}, r.Also...) {
		name := "lab"
		if i > 0 {
			name += strconv.Itoa(i)
		}
		fmt.Fprintf(&b, ` bmp targets %s
  bmp stats interval 1000
  bmp monitor ipv4 unicast pre-policy
  bmp monitor ipv4 unicast post-policy
  bmp connect %s port %d min-retry 100 max-retry 1000
 exit
!
`, name, c.Addr(), c.Port())
	}
	return b.String()
}

// Ask runs a command on the router, like an operator with vtysh: "show bmp".
func (r *Router) Ask(ctx context.Context, e *lab.Env, command string) (string, error) {
	return r.vtysh(ctx, e, "router", r.Namespace, "-c", command)
}

// Announce makes the neighbour announce the routes numbered from n to m, m excluded, or withdraw them.
func (r *Router) Announce(ctx context.Context, e *lab.Env, n, m int, withdraw bool) error {
	no := ""
	if withdraw {
		no = "no "
	}
	var b strings.Builder
	b.WriteString("router bgp 64601\naddress-family ipv4 unicast\n")
	for i := n; i < m; i++ {
		fmt.Fprintf(&b, "%snetwork %s\n", no, route(i))
	}
	file := filepath.Join(e.Dir, r.Name, "peer", "routes")
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
		return err
	}
	_, err := r.vtysh(ctx, e, "peer", r.Neighbour, "-f", file)
	return err
}

// route returns route number n of the neighbour.
func route(n int) string { return fmt.Sprintf("20.%d.%d.0/24", n>>8, n&0xff) }

func (r *Router) vtysh(ctx context.Context, e *lab.Env, role, namespace string, args ...string) (string, error) {
	var out bytes.Buffer
	home := filepath.Join(e.Dir, r.Name, role)
	p, err := e.Start(lab.Command{Namespace: namespace, Path: "vtysh", Output: &out, Timeout: 30 * time.Second,
		Args: append([]string{"--vty_socket", home, "--config_dir", home}, args...)})
	if err != nil {
		return "", err
	}
	select {
	case <-p.Done():
	case <-time.After(60 * time.Second):
		return "", fmt.Errorf("vtysh of the %s: no answer within 60 s", role)
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if err := p.Err(); err != nil {
		return "", fmt.Errorf("vtysh of the %s: %w: %.300s", role, err, out.String())
	}
	return out.String(), nil
}

func (r *Router) peerConfig() string {
	var b strings.Builder
	fmt.Fprintf(&b, `hostname peer
router bgp 64601
 bgp router-id %s
 no bgp ebgp-requires-policy
 no bgp network import-check
 neighbor %[2]s remote-as 64600
 neighbor %[2]s update-source %[1]s
 neighbor %[2]s timers connect 1
 address-family ipv4 unicast
`, r.Far, r.Local)
	for i := range r.Routes {
		fmt.Fprintf(&b, "  network %s\n", route(i))
	}
	b.WriteString(" exit-address-family\n!\n")
	return b.String()
}

// expiry makes exporters report flows after seconds, not minutes.
const expiry = time.Second

func (r *Router) startPmacctd(e *lab.Env, dir string) error {
	conf := filepath.Join(dir, "pmacctd.conf")
	config := strings.Join([]string{
		"daemonize: false",
		"pcap_interface: " + r.Interface,
		"aggregate: src_host, dst_host, src_port, dst_port, proto, tos",
		"plugins: nfprobe[p]",
		"nfprobe_version: 10",
		"nfprobe_receiver: " + r.Collector.String(),
		"nfprobe_source_ip: " + r.Addr.String(),
		"nfprobe_engine: 7",
		"nfprobe_timeouts: tcp=1:tcp.rst=1:tcp.fin=1:udp=1:icmp=1:general=1:maxlife=2:expint=1",
		"",
	}, "\n")
	if err := os.WriteFile(conf, []byte(config), 0o644); err != nil {
		return err
	}
	return r.startIn(e, dir, "pmacctd", "-f", conf)
}

func (r *Router) startSoftflowd(e *lab.Env, dir string) error {
	// softflowd sets no timeout for libpcap's delivery of a partly filled block of packets (256 KB). Whole
	// packets fill it sooner. -v 10 is IPFIX, -d keeps it in the foreground.
	return r.startIn(e, dir, "softflowd", "-d", "-i", r.Interface, "-n", r.Collector.String(), "-v", "10", "-C", "1500",
		"-t", fmt.Sprintf("general=%d", int(expiry.Seconds())), "-t", "maxlife=2", "-t", "tcp=1", "-t", "udp=1", "-t", "icmp=1", "-t", "expint=1",
		"-p", filepath.Join(dir, "softflowd.pid"), "-c", filepath.Join(dir, "softflowd.ctl"))
}

func (r *Router) startIn(e *lab.Env, dir, program string, args ...string) error {
	out, err := os.Create(filepath.Join(dir, program+".out"))
	if err != nil {
		return err
	}
	defer out.Close()
	r.exporter, err = e.Start(lab.Command{Namespace: r.Namespace, Path: program, Args: args, Dir: dir, Output: out})
	return err
}

// Silence stops the exporter by SIGSTOP, or continues it.
func (r *Router) Silence(on bool) {
	sig := syscall.SIGCONT
	if on {
		sig = syscall.SIGSTOP
	}
	_ = unix.Kill(-r.exporter.PID, sig) // the group: pmacctd exports from a child
}
