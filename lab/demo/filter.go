// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

func init() {
	Register(Demo{
		Name:  "filter",
		Short: "expressions drop packets before a DNS server, and change under traffic",
		Needs: []string{"knotd"},
		Run:   func(ctx context.Context, s *Stage) error { return (&filtering{Stage: s}).run(ctx) },
	})
}

// filtering is the demonstration of filters.
type filtering struct {
	*Stage
	*dnsSite
	abusers resolvers // send queries of type ANY

	mu   sync.Mutex
	rule string
}

func (d *filtering) run(ctx context.Context) error {
	return all(ctx, d.build, d.before, d.apply, d.change, d.remove)
}

func (d *filtering) build(ctx context.Context) (err error) {
	d.rule = "none"
	if d.dnsSite, err = d.newDNSSite(ctx, 20, 100*time.Millisecond); err != nil {
		return err
	}
	d.Live(d.picture)
	return d.abusers.start(ctx, d.Stage, d.dialer, d.many[:5], dnsAt, 20*time.Millisecond, typeANY)
}

// measure returns the answered shares of the clients and of the abusers.
func (d *filtering) measure(ctx context.Context) (good, bad float64, err error) {
	sent, got := d.abusers.sent.Load(), d.abusers.got.Load()
	if good, err = d.resolvers.share(ctx, 1500*time.Millisecond); err != nil {
		return 0, 0, err
	}
	return good, min(1, float64(d.abusers.got.Load()-got)/float64(d.abusers.sent.Load()-sent)), nil
}

func (d *filtering) before(ctx context.Context) error {
	if err := d.Say(ctx, "a DNS server (knot) answers clients. Some hosts misuse it with queries of type ANY, which have large answers"); err != nil {
		return err
	}
	good, bad, err := d.measure(ctx)
	if err != nil {
		return err
	}
	d.Check(good > 0.95 && bad > 0.95, "without a filter all are answered: A %.0f %%, ANY %.0f %%", 100*good, 100*bad)
	return nil
}

// rules writes a filter and applies it.
func (d *filtering) rules(ctx context.Context, match string) error {
	file, err := d.File("weir.yaml", fmt.Sprintf(`filter:
  - name: dns
    netns: %s
    hook: tcx
    interfaces: [in]
    rules:
      - {name: any, match: '%s', action: drop}
`, d.host.Name, match))
	if err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "apply", "-f", file); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rule = match
	return nil
}

func (d *filtering) apply(ctx context.Context) error {
	if err := d.Say(ctx, "a rule in Wireshark's language becomes an eBPF program at the interface. No clang, no restart"); err != nil {
		return err
	}
	if err := d.rules(ctx, "udp.dstport == 53 and dns.qtype == 255"); err != nil {
		return err
	}
	good, bad, err := d.measure(ctx)
	if err != nil {
		return err
	}
	d.Check(good > 0.95 && bad == 0, "with the filter: A %.0f %%, ANY %.0f %%", 100*good, 100*bad)
	d.Sum("Rule on dns.qtype: A queries answered %.0f %%, ANY queries %.0f %%.", 100*good, 100*bad)
	_, err = d.host.Type(ctx, "filter", "list")
	return err
}

// change replaces the rule under traffic.
func (d *filtering) change(ctx context.Context) error {
	if err := d.Say(ctx, "the rule changes under traffic: ANY is allowed, at most 10 a second of each source"); err != nil {
		return err
	}
	if err := d.rules(ctx, "dns.qtype == 255 and rate(net.src) > 10/s"); err != nil {
		return err
	}
	if _, _, err := d.measure(ctx); err != nil { // the first second may pass at once
		return err
	}
	good, bad, err := d.measure(ctx)
	if err != nil {
		return err
	}
	d.Check(good > 0.95 && bad > 0.1 && bad < 0.4, "with the rate: A %.0f %%, ANY %.0f %% (50 a second sent by each source)", 100*good, 100*bad)
	d.Sum("Rule with a rate of 10/s: A queries answered %.0f %%, ANY queries %.0f %% of 50/s.", 100*good, 100*bad)
	out, err := d.host.Type(ctx, "filter", "list")
	d.Still() // with the filter
	if err == nil {
		d.Check(strings.Contains(out, "any"), "weir filter list counts the packets of the rule")
	}
	return err
}

func (d *filtering) remove(ctx context.Context) error {
	if err := d.Say(ctx, "weir remove filter takes it away"); err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "remove", "filter", "--allow-outage"); err != nil {
		return err
	}
	d.mu.Lock()
	d.rule = "none"
	d.mu.Unlock()
	good, bad, err := d.measure(ctx)
	if err != nil {
		return err
	}
	d.Check(good > 0.95 && bad > 0.95, "all are answered again: A %.0f %%, ANY %.0f %%", 100*good, 100*bad)
	return nil
}

func (d *filtering) picture() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return []string{
		"25 senders ──▶ filter ──▶ 10.97.0.1:53 (knot)", "",
		"  drop: " + d.rule, "",
		fmt.Sprintf("  A queries    %6d sent   %6d answered", d.resolvers.sent.Load(), d.resolvers.got.Load()),
		fmt.Sprintf("  ANY queries  %6d sent   %6d answered", d.abusers.sent.Load(), d.abusers.got.Load()),
	}
}
