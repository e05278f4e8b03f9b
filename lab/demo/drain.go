// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/topo"
)

func init() {
	Register(Demo{
		Name:  "drain",
		Short: "a server behind the load balancer is emptied: its live TCP sessions move, none is reset",
		Run:   func(ctx context.Context, s *Stage) error { return (&draining{Stage: s}).run(ctx) },
	})
}

// draining is the demonstration of moves between servers.
type draining struct {
	*Stage
	certs   rig.Certificates
	client  *Host
	lb      *Host
	servers [2]*Host
	clients talkers

	mu    sync.Mutex
	has   [2]int // sessions at the servers
	state [2]string
}

const serviceAt = "10.55.0.1:7001"

func (d *draining) run(ctx context.Context) error {
	return all(ctx, d.build, d.start, d.talk, d.drain, d.off)
}

// build connects a client, a load balancer and two servers.
func (d *draining) build(ctx context.Context) (err error) {
	if err := d.Say(ctx, "two servers behind a load balancer. One is to be switched off, and its clients have long sessions"); err != nil {
		return err
	}
	if d.certs, err = rig.NewCertificates(d.Env, "certificates"); err != nil {
		return err
	}
	if d.client, err = d.Machine("client"); err != nil {
		return err
	}
	if d.lb, err = d.Machine("lb"); err != nil {
		return err
	}
	if err := Cable(d.client, "up", "10.1.0.2/24", d.lb, "client", "10.1.0.1/24"); err != nil {
		return err
	}
	anywhere := netip.MustParsePrefix("0.0.0.0/0")
	if err := topo.Route(d.client.Handle, anywhere, netip.MustParseAddr("10.1.0.1")); err != nil {
		return err
	}
	for i := range d.servers {
		n := i + 1
		if d.servers[i], err = d.Machine(fmt.Sprint("s", n), "10.55.0.1/32"); err != nil {
			return err
		}
		if err := Cable(d.servers[i], "up", fmt.Sprintf("10.2.%d.2/24", n), d.lb, fmt.Sprint("s", n), fmt.Sprintf("10.2.%d.1/24", n)); err != nil {
			return err
		}
		if err := topo.Route(d.servers[i].Handle, anywhere, netip.MustParseAddr(fmt.Sprintf("10.2.%d.1", n))); err != nil {
			return err
		}
		d.state[i] = "starting"
	}
	d.Live(d.picture)
	return topo.Sysctl(d.lb.Handle, "net.ipv4.ip_forward", "1")
}

// start starts the load balancer, the agents and the servers.
func (d *draining) start(ctx context.Context) error {
	file, err := d.File("lb.yaml", fmt.Sprintf(`lb:
  devices: [client, s1, s2]
  listen: 0.0.0.0:7946
  tls: %s
  register: true
  startup_timeout: 10ms
  services:
    count: {number: 0, listen: [tcp %s]}
`, d.certs.TLS("lb"), serviceAt))
	if err != nil {
		return err
	}
	d.Typed("weir serve -f lb.yaml --only lb &          # on the load balancer")
	if _, err := d.lb.Serve("-f", file, "--only", "lb"); err != nil {
		return err
	}
	for i := range d.servers {
		if err := d.startServer(ctx, i); err != nil {
			return err
		}
	}
	return within(ctx, patience, "all agents are connected", func() error { return d.connected(ctx) })
}

func (d *draining) startServer(ctx context.Context, i int) error {
	n, h := i+1, d.servers[i]
	name := fmt.Sprint("s", n)
	text := fmt.Sprintf(`handoff:
  keeper: {hold: 30s}
  backend:
    name: %s
    number: %d
    address: 10.2.%d.2
    listen: 10.2.%d.2:7947
    lb: {address: 10.2.%d.1:7946}
    tls: %s
    devices: [up]
    keeper: %s
`, name, n, n, n, n, d.certs.TLS(name), h.keeper())
	file := filepath.Join(d.Dir, name+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	if i == 0 {
		d.Watch.Print("# " + name + ".yaml")
		d.Output(text, 20)
	}
	d.Typed("weir serve -f %s.yaml &                    # on %s", name, name)
	if _, err := h.Serve("-f", file, "--only", "backend,keeper", "--handoff-socket", h.keeper()); err != nil {
		return err
	}
	if err := within(ctx, patience, "the session keeper answers", func() error { return dialKeeper(h) }); err != nil {
		return err
	}
	if _, err := h.startCounter("counter", serviceAt); err != nil {
		return err
	}
	return d.Pace(ctx, time.Second)
}

// connected reports the first part that is not ready.
func (d *draining) connected(ctx context.Context) error {
	s, err := d.balancer(ctx)
	if err != nil {
		return err
	}
	up := 0
	for _, b := range s.Backends {
		if b.Up && b.Connected && b.Where != "" {
			up++
		}
	}
	if s.Starting || up < len(d.servers) {
		return fmt.Errorf("%d of %d backends are up", up, len(d.servers))
	}
	for i := range d.servers {
		st, err := d.agent(i)
		if err != nil {
			return err
		}
		if !st.LB || !st.Keeper || len(st.Peers) < len(d.servers)-1 {
			return fmt.Errorf("s%d is not connected", i+1)
		}
		for peer, there := range st.Peers {
			if !there {
				return fmt.Errorf("s%d is not connected to %s", i+1, peer)
			}
		}
		d.mu.Lock()
		d.state[i] = "serving"
		d.mu.Unlock()
	}
	return nil
}

// balancer asks the load balancer.
func (d *draining) balancer(ctx context.Context) (s lb.Status, err error) {
	out, err := d.lb.Run(ctx, "lb", "status", "--json")
	if err != nil {
		return s, err
	}
	var every []lb.Status
	if err := json.Unmarshal([]byte(out), &every); err != nil {
		return s, err
	}
	for _, s := range every {
		if s.Agent {
			return s, nil
		}
	}
	return s, fmt.Errorf("the load balancer does not answer")
}

// agent asks the agent of a server.
func (d *draining) agent(i int) (s backend.Status, err error) {
	err = d.servers[i].Do(func() (err error) {
		s, err = backend.StatusHere(context.Background())
		return err
	})
	return s, err
}

func (d *draining) talk(ctx context.Context) error {
	n := 40
	if d.Short() {
		n = 12
	}
	if err := d.clients.open(ctx, d.Stage, d.client.Handle, serviceAt, n); err != nil {
		return err
	}
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	d.countSessions()
	if err := d.Say(ctx, "%d clients talk to %s. Each connection has one server", n, serviceAt); err != nil {
		return err
	}
	_, err := d.lb.Type(ctx, "lb", "status")
	return err
}

// countSessions counts the connections of each server in the kernel.
func (d *draining) countSessions() (all [2]int) {
	for i, h := range d.servers {
		all[i] = established(h, 7001)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.has = all
	return all
}

// drain empties the first server.
func (d *draining) drain(ctx context.Context) error {
	if err := d.Say(ctx, "the first server is drained: its sessions move to the other one, byte for byte, while the clients talk"); err != nil {
		return err
	}
	before := d.countSessions()
	d.clients.slowest()
	d.mu.Lock()
	d.state[0] = "draining"
	d.mu.Unlock()
	if _, err := d.servers[0].Type(ctx, "handoff", "drain", "--wait"); err != nil {
		return err
	}
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	after := d.countSessions()
	n, ended, answers, wrong := d.clients.counts()
	slowest := d.clients.slowest()
	d.Check(before[0] > 0 && after[0] == 0 && after[1] == n, "%d sessions moved from s1 to s2", before[0])
	d.Check(ended == 0 && wrong == 0, "no connection was reset, %d answers, %d wrong", answers, wrong)
	d.Sum("%d of %d live TCP sessions moved to the other server: %d reset, %d wrong answers.", before[0], n, ended, wrong)
	d.Sum("Longest wait of a client during the moves: %s.", slowest.Round(100*time.Microsecond))
	_, err := d.servers[0].Type(ctx, "handoff", "backend", "status")
	return err
}

// off switches the empty server off.
func (d *draining) off(ctx context.Context) error {
	if err := d.Say(ctx, "the empty server is switched off: its cable is pulled"); err != nil {
		return err
	}
	d.Typed("ip link set dev up down                    # on s1")
	if _, err := d.servers[0].Exec(ctx, "ip", "link", "set", "dev", "up", "down"); err != nil {
		return err
	}
	d.mu.Lock()
	d.state[0] = "down"
	d.mu.Unlock()
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	n, ended, _, wrong := d.clients.counts()
	d.Check(ended == 0 && wrong == 0, "all %d connections go on without it", n)
	d.Sum("The drained server was switched off. All %d connections went on.", n)
	return d.Pace(ctx, 2*time.Second)
}

func (d *draining) picture() []string {
	n, ended, answers, wrong := d.clients.counts()
	d.mu.Lock()
	defer d.mu.Unlock()
	lines := []string{fmt.Sprintf("%d clients ──▶ load balancer ──▶ %s", n, serviceAt), ""}
	for i := range d.servers {
		lines = append(lines, fmt.Sprintf("   s%d  %-10s %3d sessions  %s", i+1, d.state[i], d.has[i], strings.Repeat("█", d.has[i])))
	}
	return append(lines, "", fmt.Sprintf("connections: %d open, %d ended    answers: %d, %d wrong", n-ended, ended, answers, wrong))
}
