// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// finish ends the last epoch of a stage and its traffic, after all records are counted.
func (s *stage) finish(ctx context.Context) error {
	s.endEpoch(s.ledger.undisturbed(len(s.collectors)))
	last := &s.spans[len(s.spans)-1]
	// The last records stay in nfacctd's buffer until more follow. A few more follow, uncounted.
	if err := s.ledger.drain(ctx, last.epoch, last.calm, drainLimit); err != nil {
		return err
	}
	if err := pause(ctx, 200*time.Millisecond); err != nil { // the next poll of the readers
		return err
	}
	s.fleet.Stop()
	return nil
}

// end ends the traffic, sets the metrics and removes weir.
func (x *experiment) end(ctx context.Context) error {
	x.say("end of traffic; comparing sent with counted records, router by router")
	datagrams, messages := x.fleet.Total()
	x.result.Set("ipfix_messages", float64(datagrams))
	x.result.Set("bmp_messages", float64(messages))
	sum, err := x.finishFast(ctx)
	if err != nil {
		return err
	}
	if err := x.finish(ctx); err != nil {
		return err
	}
	if err := x.child.wait(ctx, x.result); err != nil {
		return err
	}
	sum.add(x.ledger.audit(x.spans))
	sum.set(x.result)
	x.ledger.census().set(x.result)
	x.result.Set("restarts_nfacctd", float64(x.restarted))
	x.result.Set("restarts", float64(x.restarted)+x.result.Metrics["restarts_sinks"])
	x.latencies()
	if x.weir == nil {
		return nil
	}
	if err := x.askWhere(ctx); err != nil { // the same devices came back: the answer must not have changed
		return err
	}
	return x.weir.Remove(ctx)
}

// latencies sets the measured times.
func (x *experiment) latencies() {
	for name, d := range map[string][]time.Duration{"readmit_ms": x.readmits, "readmit_sinks_ms": x.sinkReadmits} {
		if len(d) > 0 {
			p50, _, longest := lab.Percentiles(d)
			x.result.Set(name+"_p50", ms(p50))
			x.result.Set(name+"_max", ms(longest))
		}
	}
	if x.weir == nil {
		return
	}
	var restarts, withHeld time.Duration
	var moves sides
	for _, s := range append([]*stage{x.stage}, x.fast...) {
		longest, held, which := s.undecodable()
		restarts, withHeld = max(restarts, longest), max(withHeld, held)
		if longest > time.Second {
			x.result.Note("undecodable for %.1f s: %s", longest.Seconds(), which)
		}
		m := s.moved()
		moves = sides{max(moves.undecodable, m.undecodable), max(moves.overlap, m.overlap)}
	}
	x.result.Set("undecodable_seconds", restarts.Seconds())
	x.result.Set("undecodable_seconds_held", withHeld.Seconds())
	x.result.Set("undecodable_seconds_moved", moves.undecodable.Seconds())
	x.result.Set("resize_overlap_ms", ms(moves.overlap))
}

// claim is a claim of the experiment.
type claim struct {
	kind                lab.Kind
	claim, metric, want string
}

// claims evaluates weir's promises.
func (x *experiment) claims() {
	all := []claim{
		{lab.Correctness, "routers with both IPFIX and BMP counted", "devices", x.plan.wantDevices},
		{lab.Correctness, "real collectors share the work", "collectors", ">= 3"},
		{lab.Correctness, "both protocols were counted", "protocols", "== 2"},
		{lab.Correctness, "no router is split over collectors", "split_devices", "== 0"},
		{lab.Correctness, "nothing reached a collector other than the one named before", "misdirected", "== 0"},
		{lab.Correctness, "only routers of a dead collector are rejected", "rejected_other_slots", "== 0"},
		{lab.Correctness, "every accepted record was decoded and counted, router by router", "decode_errors", "== 0"},
		{lab.Correctness, "collectors were killed and returned under traffic", "restarts", fmt.Sprintf(">= %d", x.kills.restarts+len(x.fast)*x.plan.fast.kills.restarts)},
		{lab.Correctness, "after a storm every router is up at its collector", "storm_up", fmt.Sprintf("== %d", len(x.ledger.accounts))},
		{lab.Performance, "a returning collector is admitted within 100 ms of its last socket", "readmit_ms_p50", "< 100"},
	}
	if !x.env.Control {
		all = append(all, x.fastClaims()...)
	}
	for _, c := range all {
		if c.kind == lab.Correctness || x.env.Size != lab.Smoke {
			x.result.Claim(c.kind, c.claim, c.metric, c.want)
		}
	}
}

// fastClaims returns the claims for fast sinks and the claims about weir alone.
func (x *experiment) fastClaims() []claim {
	ratio := fmt.Sprintf("<= %.4f", 1/float64(x.plan.fast.slots+1)+0.02)
	return []claim{
		{lab.Correctness, "both engines steered", "engines", "== 2"},
		{lab.Correctness, "routers of fast sinks with both IPFIX and BMP counted", "devices_sinks", fmt.Sprintf("== %d", len(x.fast)*x.plan.fast.devices)},
		{lab.Correctness, "a change by one slot moves at most its share of the buckets and 2 %", "resize_moved_ratio", ratio},
		{lab.Correctness, "the change moved routers", "resize_moved_devices", ">= 1"},
		{lab.Correctness, "during a change of slots every record is at the collector of the old or the new table", "misdirected_during_resize", "== 0"},
		{lab.Correctness, "routers without a move notice nothing of the change", "resize_collateral", "== 0"},
		{lab.Correctness, "an upgrade of the programs misdirects nothing", "misdirected_during_upgrade", "== 0"},
		{lab.Correctness, "an upgrade loses no record", "lost_during_upgrade", "== 0"},
		{lab.Correctness, "an upgrade refuses no session or datagram", "touched_during_upgrade", "== 0"},
		{lab.Correctness, "no router had to repeat its template for a new collector", "templates_missing", "== 0"},
		{lab.Performance, "a new collector decodes within a second of its admission", "undecodable_seconds", "<= 1"},
	}
}

// chatter creates traffic between a real router and its neighbour, as input for the exporter.
func (x *experiment) chatter(ctx context.Context, site rig.RealSite) {
	go func() {
		d := routers.NewDialer(site.Router.Handle)
		defer d.Close()
		for ctx.Err() == nil {
			conn, err := d.Dial("udp", site.RouterBGP, netip.AddrPortFrom(site.Neighbour, 9))
			if err == nil {
				for range 10 {
					_, _ = conn.Write(make([]byte, 1400)) // discarded; large, see Router.startSoftflowd
				}
				conn.Close()
			}
			if pause(ctx, 100*time.Millisecond) != nil {
				return
			}
		}
	}()
}
