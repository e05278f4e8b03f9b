// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/lab/routers"
	"github.com/weir-project/weir/lab/topo"
)

func init() {
	Register(Demo{
		Name:  "guard",
		Short: "a DNS server in a UDP flood from drawn addresses; its clients keep their answers",
		Needs: []string{"knotd"},
		Run:   func(ctx context.Context, s *Stage) error { return (&guarding{Stage: s}).run(ctx) },
	})
}

// dnsSite is a DNS server with clients one cable away. Filter and guard share it.
type dnsSite struct {
	host, clients *Host
	dialer        *routers.Dialer
	many          []netip.Addr
	resolvers     resolvers
}

var (
	dnsAt  = netip.MustParseAddrPort("10.97.0.1:53")
	floods = netip.MustParsePrefix("100.64.0.0/10")
)

// newDNSSite starts the server and n clients.
func (s *Stage) newDNSSite(ctx context.Context, n int, every time.Duration) (*dnsSite, error) {
	d := &dnsSite{}
	var err error
	if d.host, err = s.Host("dns"); err != nil {
		return nil, err
	}
	if d.clients, err = s.Host("clients"); err != nil {
		return nil, err
	}
	many := netip.MustParsePrefix("10.99.0.0/24")
	err = Cable(d.host, "in", "10.97.0.1/30", d.clients, "up", "10.97.0.2/30")
	for _, step := range []func() error{
		func() error { return topo.Own(d.clients.Handle, many) },
		func() error { return topo.Route(d.host.Handle, many, netip.MustParseAddr("10.97.0.2")) },
		func() error { return topo.Route(d.host.Handle, floods, netip.MustParseAddr("10.97.0.2")) },
		func() error { return topo.Sysctl(d.host.Handle, "net.ipv4.conf.all.rp_filter", "0") },
		func() error { return topo.Sysctl(d.host.Handle, "net.ipv4.conf.in.rp_filter", "0") },
	} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return nil, err
	}
	d.dialer = routers.NewDialer(d.clients.Handle)
	s.OnClose(func() { d.dialer.Close() })
	for a := many.Addr().Next(); len(d.many) < n; a = a.Next() {
		d.many = append(d.many, a)
	}
	if _, err := d.host.knot(); err != nil {
		return nil, err
	}
	if err := d.host.reachable(ctx, dnsAt.String()); err != nil {
		return nil, err
	}
	return d, d.resolvers.start(ctx, s, d.dialer, d.many, dnsAt, every, typeA)
}

// guarding is the demonstration of the guard.
type guarding struct {
	*Stage
	*dnsSite
	flood *flood

	mu    sync.Mutex
	state string
	last  [3]int64 // queries, answers, flood, at the last picture
	at    time.Time
}

const guardLimit = "2kpps"

func (d *guarding) run(ctx context.Context) error {
	err := all(ctx, d.build, d.calm, d.flooded, d.guard)
	if d.flood != nil {
		err = errors.Join(err, d.flood.end())
	}
	return err
}

func (d *guarding) build(ctx context.Context) (err error) {
	d.state = "none"
	if d.dnsSite, err = d.newDNSSite(ctx, 20, 100*time.Millisecond); err != nil {
		return err
	}
	d.Live(d.picture)
	return d.Say(ctx, "a DNS server (knot) with 20 clients, together 200 queries a second")
}

func (d *guarding) calm(ctx context.Context) error {
	share, err := d.resolvers.share(ctx, 2*time.Second)
	if err != nil {
		return err
	}
	d.Check(share > 0.95, "without a flood %.0f %% of the queries are answered", 100*share)
	return nil
}

// flooded shows the flood without a guard.
func (d *guarding) flooded(ctx context.Context) error {
	rate := 100_000
	if d.Short() {
		rate = 20_000
	}
	if err := d.Say(ctx, "a flood begins: valid queries from four million drawn addresses. The server signs each answer. No rule about sources could stop it"); err != nil {
		return err
	}
	d.flood = startFlood(d.clients.Handle, floods, dnsAt, rate)
	sent, begin := d.flood.sent.Load(), time.Now()
	share, err := d.resolvers.share(ctx, 3*time.Second)
	if err != nil {
		return err
	}
	pps := float64(d.flood.sent.Load()-sent) / time.Since(begin).Seconds()
	d.Sum("Flood of %.0f packets a second without a guard: %.0f %% of the clients' queries were answered.", pps, 100*share)
	return d.Say(ctx, "%.0f packets a second: %.0f %% of the clients' queries are answered", pps, 100*share)
}

// guard applies a guard in the midst of the flood.
func (d *guarding) guard(ctx context.Context) error {
	if err := d.Say(ctx, "a guard bounds the service and lets clients with good behaviour go first. It finds them by itself"); err != nil {
		return err
	}
	file, err := d.File("weir.yaml", fmt.Sprintf(`services:
  dns:
    listen: [udp 10.97.0.1:53]
    netns: %s
    guard: {limit: %s, interfaces: [in]}
`, d.host.Name, guardLimit))
	if err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "apply", "-f", file); err != nil {
		return err
	}
	d.mu.Lock()
	d.state = guardLimit
	d.mu.Unlock()
	learn, measure := 6*time.Second, 8*time.Second
	if d.Short() {
		measure = 3 * time.Second
	}
	if err := pause(ctx, learn); err != nil {
		return err
	}
	share, err := d.resolvers.share(ctx, measure)
	if err != nil {
		return err
	}
	d.Check(share > 0.9, "in the flood, with the guard, %.0f %% of the clients' queries are answered", 100*share)
	d.Sum("With a guard of %s, applied during the flood: %.0f %% from the sixth second on.", guardLimit, 100*share)
	out, err := d.host.Type(ctx, "guard", "status")
	if err == nil {
		d.Still() // with the flood
		d.Check(strings.Contains(out, "dns"), "weir guard status names the service")
	}
	return err
}

func (d *guarding) picture() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := [3]int64{d.resolvers.sent.Load(), d.resolvers.got.Load(), 0}
	if d.flood != nil {
		now[2] = d.flood.sent.Load()
	}
	seconds := time.Since(d.at).Seconds()
	rate := func(i int) float64 { return float64(now[i]-d.last[i]) / seconds }
	lines := []string{
		fmt.Sprintf("20 clients ──▶ 10.97.0.1:53 (knot)     guard: %s", d.state), "",
		fmt.Sprintf("  clients   %8.0f queries/s   %8.0f answers/s", rate(0), rate(1)),
		fmt.Sprintf("  flood     %8.0f packets/s", rate(2)),
	}
	if seconds > 1 {
		d.last, d.at = now, time.Now()
	}
	return lines
}
