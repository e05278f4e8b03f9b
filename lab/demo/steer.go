// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/routers"
	"github.com/weir-project/weir/lab/topo"
)

func init() {
	Register(Demo{
		Name:  "steer",
		Short: "every client keeps its own server of three, also after one is killed and returns",
		Needs: []string{"nginx"},
		Run:   func(ctx context.Context, s *Stage) error { return (&steering{Stage: s}).run(ctx) },
	})
}

const steerServers = 3

// steering is the demonstration of steering.
type steering struct {
	*Stage
	host  *Host
	crowd *crowd
	pids  [steerServers]string

	mu      sync.Mutex
	servers [steerServers]*lab.Process
	last    []answer
	homes   []string // of each client
}

func (d *steering) run(ctx context.Context) error {
	return all(ctx, d.build, d.without, d.with, d.kill, d.back)
}

// build connects 60 clients to a host with three servers on one port.
func (d *steering) build(ctx context.Context) (err error) {
	if d.host, err = d.Host("servers", "10.98.0.1/32"); err != nil {
		return err
	}
	clients, err := d.Host("clients")
	if err != nil {
		return err
	}
	if err := Cable(d.host, "clients", "10.97.0.1/30", clients, "up", "10.97.0.2/30"); err != nil {
		return err
	}
	many := netip.MustParsePrefix("10.99.0.0/24")
	for _, err := range []error{
		topo.Own(clients.Handle, many),
		topo.Route(clients.Handle, netip.MustParsePrefix("10.98.0.1/32"), netip.MustParseAddr("10.97.0.1")),
		topo.Route(d.host.Handle, many, netip.MustParseAddr("10.97.0.2")),
	} {
		if err != nil {
			return err
		}
	}
	d.crowd = &crowd{dialer: routers.NewDialer(clients.Handle), to: netip.MustParseAddrPort("10.98.0.1:80")}
	d.OnClose(func() { d.crowd.dialer.Close() })
	for a := many.Addr().Next(); len(d.crowd.clients) < 60; a = a.Next() {
		d.crowd.clients = append(d.crowd.clients, a)
	}
	for i := range steerServers {
		if err := d.start(i); err != nil {
			return err
		}
	}
	d.Live(d.picture)
	return d.host.reachable(ctx, "10.98.0.1:80")
}

func (d *steering) start(i int) error {
	p, pidfile, err := d.host.nginx(fmt.Sprintf("nginx-%d", i), "80")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.servers[i], d.pids[i] = p, pidfile
	return err
}

// ask makes every client send a request.
func (d *steering) ask(ctx context.Context) []answer {
	answers := d.crowd.ask(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = answers
	return answers
}

// without shows the kernel's own choice.
func (d *steering) without(ctx context.Context) error {
	if err := d.Say(ctx, "three nginx share port 80; without weir the kernel chooses a server anew for each connection"); err != nil {
		return err
	}
	seen := make([]map[string]bool, len(d.crowd.clients))
	for i := range seen {
		seen[i] = map[string]bool{}
	}
	for range 5 {
		for i, a := range d.ask(ctx) {
			seen[i][a.from] = true
		}
	}
	split := 0
	for _, s := range seen {
		if len(s) > 1 {
			split++
		}
	}
	d.Sum("without weir: %d of %d clients met more than one server in 5 requests", split, len(seen))
	return d.Say(ctx, "%d of %d clients met more than one server in 5 requests", split, len(seen))
}

// with applies weir to the running servers.
func (d *steering) with(ctx context.Context) error {
	if err := d.Say(ctx, "weir gives each client address a slot, and each slot a process. The servers keep running"); err != nil {
		return err
	}
	var members strings.Builder
	for i, p := range d.pids {
		fmt.Fprintf(&members, "      - {slot: %d, pidfile: %s}\n", i, p)
	}
	file, err := d.File("weir.yaml", fmt.Sprintf(`services:
  web:
    listen: [tcp 0.0.0.0:80]
    netns: %s
    steer: {by: source, slots: 3, on_empty: reject, seed: %d}
    members:
%s`, d.host.Name, uint32(d.Seed), members.String()))
	if err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "apply", "-f", file); err != nil {
		return err
	}
	d.Typed("weir serve &")
	if _, err := d.host.Serve(); err != nil {
		return err
	}
	if err := d.awaitSlots(ctx); err != nil {
		return err
	}
	for _, a := range d.ask(ctx) {
		d.homes = append(d.homes, a.from)
	}
	d.Check(d.strays(ctx, "") == 0, "each of %d clients has one server, 5 times of 5", len(d.homes))
	_, err = d.host.Type(ctx, "steer", "where", d.crowd.clients[6].String(), "--service", "web")
	return err
}

// awaitSlots waits until every client gets an answer.
func (d *steering) awaitSlots(ctx context.Context) error {
	return within(ctx, patience, "every client gets an answer", func() error {
		for i, a := range d.ask(ctx) {
			if a.err != nil || a.from == "" {
				return fmt.Errorf("%s: no answer: %w", d.crowd.clients[i], a.err)
			}
		}
		return nil
	})
}

// strays counts answers of another server than the client's own, in five rounds. dead is a killed server.
func (d *steering) strays(ctx context.Context, dead string) (n int) {
	for range 5 {
		for i, a := range d.ask(ctx) {
			if a.from != d.homes[i] && !(a.from == "" && d.homes[i] == dead) {
				n++
			}
		}
	}
	return n
}

// kill kills a server. Its clients are refused.
func (d *steering) kill(ctx context.Context) error {
	if err := d.Say(ctx, "now the second server is killed. Only its clients may notice"); err != nil {
		return err
	}
	d.Typed("kill -9 $(cat nginx-1.pid)")
	if err := d.servers[1].Signal(9); err != nil {
		return err
	}
	<-d.servers[1].Done()
	strays, refused := d.strays(ctx, "nginx-1"), 0
	for _, a := range d.last {
		if a.from == "" {
			refused++
		}
	}
	d.Check(refused > 0 && strays == 0, "the %d clients of the dead server are refused, all others are served as before", refused)
	d.Sum("after kill -9 of one server: %d clients refused, the other %d served by the same servers", refused, len(d.homes)-refused)
	_, err := d.host.Type(ctx, "steer", "status", "web")
	d.Still() // with refused clients
	return err
}

// back starts the server again. The same clients return to it.
func (d *steering) back(ctx context.Context) error {
	if err := d.Say(ctx, "the server starts again, and weir serve gives it its slot"); err != nil {
		return err
	}
	if err := d.start(1); err != nil {
		return err
	}
	if err := d.awaitSlots(ctx); err != nil {
		return err
	}
	d.Check(d.strays(ctx, "") == 0, "every client is back at the server that it had before")
	d.Sum("after its return: every client at its old server")
	if err := d.Say(ctx, "weir remove gives the port back to the kernel, at once"); err != nil {
		return err
	}
	_, err := d.host.Type(ctx, "remove", "--allow-outage")
	return err
}

// picture shows the servers with their clients.
func (d *steering) picture() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	counts := map[string]int{}
	for _, a := range d.last {
		counts[a.from]++
	}
	lines := []string{fmt.Sprintf("%d clients ──▶ 10.98.0.1:80 ──▶ slot ──▶ server", len(d.crowd.clients)), ""}
	for i, p := range d.servers {
		state := "dead"
		if p != nil && p.Running() {
			state = "serving"
		}
		n := counts[fmt.Sprintf("nginx-%d", i)]
		lines = append(lines, fmt.Sprintf("  slot %d   nginx-%d   %-8s %3d clients  %s", i, i, state, n, strings.Repeat("█", n/2)))
	}
	if n := counts[""]; n > 0 {
		lines = append(lines, fmt.Sprintf("  %-20s refused  %3d clients  %s", "", n, strings.Repeat("░", n/2)))
	}
	return lines
}
