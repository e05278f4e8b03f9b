// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	_ "embed"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
)

func init() {
	Register(Demo{
		Name:  "plan",
		Short: "repairs of every link failure in the Abilene network, computed and drawn",
		Run:   func(ctx context.Context, s *Stage) error { return (&planning{Stage: s}).run(ctx) },
	})
}

// abilene is the backbone of Internet2 in 2004, with great-circle distances in kilometres as metrics.
//
//go:embed abilene.yaml
var abilene string

// planning is the demonstration of the planner.
type planning struct {
	*Stage
	host *Host
	file string
}

func (d *planning) run(ctx context.Context) error {
	return all(ctx, d.build, d.summary, d.one, d.draw)
}

func (d *planning) build(ctx context.Context) (err error) {
	d.Watch.Show([]string{
		"  Seattle ───────── Denver ──── KansasCity ── Indianapolis ── Chicago ── NewYork",
		"     │                │             │              │                       │",
		"  Sunnyvale ──────────┘          Houston ────── Atlanta ──────────── Washington",
		"     │                              │",
		"  LosAngeles ───────────────────────┘",
	})
	if d.host, err = d.Host("router"); err != nil {
		return err
	}
	if err := d.Say(ctx, "a link fails. Until all routers have computed new routes, packets need a way around it that the old routes of all others do not break"); err != nil {
		return err
	}
	d.file = filepath.Join(d.Dir, "abilene.yaml")
	return os.WriteFile(d.file, []byte(abilene), 0o644)
}

// summary plans for all routers.
func (d *planning) summary(ctx context.Context) error {
	if err := d.Say(ctx, "the planner computes a list of segments for each failure and destination (TI-LFA). Nothing is changed on this machine"); err != nil {
		return err
	}
	out, err := d.host.Type(ctx, "reroute", "plan", "-f", d.file)
	if err != nil {
		return err
	}
	d.Check(strings.Contains(out, " 0 unprotected"), "every link failure of the 11 routers has a repair for every destination")
	return nil
}

// one plans for one router and one destination.
func (d *planning) one(ctx context.Context) error {
	if err := d.Say(ctx, "the repairs of one router: a failure, a destination, the link to take, the segments"); err != nil {
		return err
	}
	if _, err := d.host.Type(ctx, "reroute", "plan", "-f", d.file, "--node", "Denver"); err != nil {
		return err
	}
	out, err := d.host.Run(ctx, "reroute", "plan", "-f", d.file, "--node", "Denver", "--json")
	if err != nil {
		return err
	}
	d.Check(json.Valid([]byte(out)), "weir reroute plan --json prints the plan for programs")
	d.Sum("Denver's repairs in the Abilene network are planned for all destinations.")
	return nil
}

// draw draws a repair.
func (d *planning) draw(ctx context.Context) error {
	svg := filepath.Join(d.Dir, "plan-repair.svg")
	if _, err := d.host.Type(ctx, "reroute", "plan", "-f", d.file, "--node", "Denver", "--destination", "KansasCity", "--svg", svg); err != nil {
		return err
	}
	b, err := os.ReadFile(svg)
	if err != nil {
		return err
	}
	d.Check(strings.Contains(string(b), "</svg>"), "the repair from Denver to KansasCity is drawn, %d KiB", len(b)>>10)
	d.Sum("The repair is drawn in plan-repair.svg: --keep DIR or --record DIR keeps it.")
	return nil
}
