// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/weir-project/weir/lab"
)

// Proxy is HAProxy in front of TCP collectors. It maps each source address to a collector, and sends the
// address to it in a leading PROXY header (send-proxy).
type Proxy struct {
	Listen    netip.AddrPort
	Backlog   int                // of its listener
	Backends  []netip.AddrPort   // of the collectors
	Collector map[netip.Addr]int // source address to index of its collector
	Header    bool               // the collectors accept a PROXY header
	Spread    bool               // connections go to the collectors in turn, regardless of their source
}

// configuration returns an operator's configuration. Other settings keep HAProxy's defaults, including the
// number of threads.
func (p *Proxy) configuration(sources string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `global
    maxconn 8192
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend telemetry
    bind %s backlog %d
    maxconn 8192
`, p.Listen, p.Backlog)
	if p.Spread {
		b.WriteString("    default_backend all\nbackend all\n    balance roundrobin\n")
		for i, to := range p.Backends {
			fmt.Fprintf(&b, "    server collector%d %s\n", i, to)
		}
		return b.String()
	}
	fmt.Fprintf(&b, "    use_backend %%[src,map_ip(%s,collector0)]\n", sources)
	header := ""
	if p.Header {
		header = " send-proxy"
	}
	for i, to := range p.Backends {
		fmt.Fprintf(&b, "backend collector%d\n    server collector%d %s%s\n", i, i, to, header)
	}
	return b.String()
}

// Start starts HAProxy in a namespace.
func (p *Proxy) Start(e *lab.Env, namespace string) (*lab.Process, error) {
	dir := filepath.Join(e.Dir, "haproxy-"+namespace)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var sources strings.Builder
	for a, n := range p.Collector {
		fmt.Fprintf(&sources, "%s collector%d\n", a, n)
	}
	return startConfigured(e, namespace, "haproxy", []string{"-db", "-f"}, dir, "haproxy.cfg", map[string]string{
		"sources.map": sources.String(), "haproxy.cfg": p.configuration(filepath.Join(dir, "sources.map"))})
}

// Tee is nfacctd in front of UDP collectors. It maps each source address to a collector, and sends the
// datagram with its original source address (tee_transparent).
type Tee struct {
	Listen    netip.AddrPort
	Receivers []netip.AddrPort
	Collector map[netip.Addr]int // source address to index of its receiver
}

// configuration returns an operator's configuration. The queue between nfacctd's core and its plugin has
// room for an experiment's messages in transit. Datagrams are passed on one by one: a larger buffer would
// keep the last ones until more follow.
func (t *Tee) configuration(dir string) string {
	return strings.Join([]string{
		"daemonize: false",
		"nfacctd_ip: " + t.Listen.Addr().String(),
		fmt.Sprintf("nfacctd_port: %d", t.Listen.Port()),
		"nfacctd_pipe_size: 8388608",
		"pre_tag_map: " + filepath.Join(dir, "pretag.map"),
		"maps_entries: 8192",
		"plugins: tee[t]",
		"tee_transparent[t]: true",
		"tee_receivers[t]: " + filepath.Join(dir, "receivers.lst"),
		"plugin_pipe_size[t]: 16777216",
	}, "\n") + "\n"
}

// Start starts nfacctd as a tee in a namespace.
func (t *Tee) Start(e *lab.Env, namespace string) (*lab.Process, error) {
	dir := filepath.Join(e.Dir, "tee-"+namespace)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var tags, receivers strings.Builder
	for a, n := range t.Collector {
		fmt.Fprintf(&tags, "set_tag=%d ip=%s\n", n+1, a)
	}
	for i, to := range t.Receivers {
		fmt.Fprintf(&receivers, "id=%d ip=%s tag=%d\n", i+1, to, i+1)
	}
	return startConfigured(e, namespace, "nfacctd", []string{"-f"}, dir, "tee.conf", map[string]string{
		"pretag.map": tags.String(), "receivers.lst": receivers.String(), "tee.conf": t.configuration(dir)})
}

// startConfigured writes the files of a daemon into its directory and starts it. Its last argument is the
// name of its configuration.
func startConfigured(e *lab.Env, namespace, program string, args []string, dir, config string, files map[string]string) (*lab.Process, error) {
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return e.Start(lab.Command{Namespace: namespace, Path: program, Args: append(args, filepath.Join(dir, config)), Dir: dir, Output: log})
}
