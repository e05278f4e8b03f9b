// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/weir-project/weir/lab/telemetry"
)

func init() {
	Register(Demo{
		Name:  Main,
		Short: "routers' IPFIX and BMP steered to unmodified collectors, through a kill, a storm and an upgrade",
		Long:  true,
		Run: func(ctx context.Context, s *Stage) error {
			d := &collecting{Stage: s, show: telemetry.NewDemonstration(s.Env, s.Result)}
			defer d.show.Close()
			return all(ctx, d.begin, d.steer, d.storm, d.split, d.kill, d.upgrade, d.end)
		},
	})
}

// collecting is the demonstration of weir's main job.
type collecting struct {
	*Stage
	show *telemetry.Demonstration
	host *Host // for commands of weir
}

func (d *collecting) begin(ctx context.Context) error {
	if err := d.Say(ctx, "routers send IPFIX over UDP and BMP over TCP to one address. Several collectors share the work. All data of one router must reach one collector"); err != nil {
		return err
	}
	d.Watch.Show([]string{"routers ──▶ 10.98.0.1:9991 ──▶ slots ──▶ collectors (nfacctd)", "", "the collectors are starting …"})
	d.host = &Host{stage: d.Stage, label: "weir"}
	return d.show.Begin(ctx)
}

func (d *collecting) steer(ctx context.Context) error {
	if err := d.show.Steer(ctx); err != nil {
		return err
	}
	text, err := os.ReadFile(d.show.Config())
	if err != nil {
		return err
	}
	d.Watch.Print("# weir.yaml")
	d.Output(string(text), 12)
	d.Typed("weir apply -f weir.yaml && weir serve &")
	return d.Pace(ctx, 2*time.Second)
}

// storm connects all routers at once.
func (d *collecting) storm(ctx context.Context) error {
	if err := d.Say(ctx, "a reconnect storm, as after an outage: all routers connect at one moment. As many connect to collectors without weir"); err != nil {
		return err
	}
	with, without, err := d.show.Storm(ctx)
	if err != nil {
		return err
	}
	d.Check(with.Up == with.Routers, "storm with weir: %d of %d simulated routers are up after %.1f s", with.Up, with.Routers, with.Took.Seconds())
	d.Sum("Reconnect storm: with weir %d of %d routers were up after %.1f s,", with.Up, with.Routers, with.Took.Seconds())
	d.Sum("  without weir %d of %d after %.1f s. (nfacctd queues 1 connection; weir raises this.)", without.Up, without.Routers, without.Took.Seconds())
	return d.Say(ctx, "storm without weir: %d of %d routers are up after %.1f s", without.Up, without.Routers, without.Took.Seconds())
}

// split shows the streams without weir, and with it.
func (d *collecting) split(ctx context.Context) error {
	arrived, split, err := d.show.Split(ctx)
	if err != nil {
		return err
	}
	d.Sum("Without weir %d of %d routers had IPFIX at one collector and BMP at another.", split, arrived)
	if err := d.Say(ctx, "without weir %d of %d routers have IPFIX at one collector and BMP at another. The routers without weir end here", split, arrived); err != nil {
		return err
	}
	if err := d.show.Traffic(ctx); err != nil {
		return err
	}
	simulated, frr, collectors := d.show.Counts()
	d.Sum("With weir each of %d routers, %d of them FRR, had one of %d collectors for both.", simulated+frr, frr, collectors)
	_, err = d.host.Type(ctx, "steer", "where", d.show.Where().String(), "--service", "telemetry")
	return err
}

func (d *collecting) kill(ctx context.Context) error {
	if err := d.show.Kill(ctx); err != nil {
		return err
	}
	_, err := d.host.Type(ctx, "steer", "status", "telemetry")
	d.Still() // with traffic
	return err
}

func (d *collecting) upgrade(ctx context.Context) error {
	d.Typed("weir upgrade")
	return d.show.Upgrade(ctx)
}

// end compares all records and writes the summary.
func (d *collecting) end(ctx context.Context) error {
	if err := d.show.End(ctx); err != nil {
		return err
	}
	m := d.Result.Metrics
	is := func(metric string) string { return fmt.Sprintf("%.0f", m[metric]) }
	d.Check(m["split_devices"] == 0 && m["misdirected"] == 0, "no record reached another collector than the one named by weir")
	d.Check(m["rejected_other_slots"] == 0, "only routers of the killed collector were refused")
	d.Check(m["decode_errors"] == 0, "every record for a living collector was decoded and counted")
	d.Check(m["lost_during_upgrade"]+m["misdirected_during_upgrade"]+m["touched_during_upgrade"] == 0, "%s upgrades of weir lost no record and no session", is("upgrades"))
	d.Sum("Collector killed: its routers were refused, all others noticed nothing.")
	d.Sum("  It had its slot back %.0f ms after its last socket appeared.", m["readmit_ms_max"])
	d.Sum("Live upgrades: %s, lost records: %s, misdirected: %s.", is("upgrades"), is("lost_during_upgrade"), is("misdirected_during_upgrade"))
	d.Sum("Records sent to living collectors: %s, counted by them: %s.", is("records_accepted"), is("records_counted"))
	d.Sum("  Not compared: %.0f, sent while the router's collector started or was dead.", m["records_sent"]-m["records_accepted"])
	if len(d.Result.Skipped) > 0 {
		d.Sum("Not shown: %s", strings.Join(d.Result.Skipped, "; "))
	}
	d.Sum("Next: weir-lab demo (other systems); weir-lab run telemetry (eight minutes, all claims).")
	return nil
}
