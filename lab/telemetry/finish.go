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

// finish ends the traffic, sets the metrics and takes weir away.
func (x *experiment) finish(ctx context.Context) error {
	x.say("the traffic ends; comparing what was sent with what was counted, router by router")
	x.endEpoch(x.ledger.undisturbed(len(x.collectors)))
	last := &x.spans[len(x.spans)-1]
	// The last records stay in nfacctd's own buffer until more follow: a little more follows, uncounted.
	if err := x.ledger.drain(ctx, last.epoch, last.calm, drainLimit); err != nil {
		return err
	}
	if err := x.child.wait(ctx, x.result); err != nil {
		return err
	}
	time.Sleep(200 * time.Millisecond) // the readers' next look
	x.ledger.audit(x.spans)
	p50, _, longest := lab.Percentiles(x.readmits)
	if len(x.readmits) > 0 {
		x.result.Set("readmit_ms_p50", ms(p50))
		x.result.Set("readmit_ms_max", ms(longest))
	}
	datagrams, messages := x.fleet.Total()
	x.fleet.Stop()
	x.result.Set("ipfix_messages", float64(datagrams))
	x.result.Set("bmp_messages", float64(messages))
	if x.weir == nil {
		return nil
	}
	return x.weir.Remove(ctx)
}

// claims are what the product promises.
func (x *experiment) claims() {
	r := x.result
	devices := fmt.Sprintf("== %d", len(x.ledger.accounts))
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
	}{
		{lab.Correctness, "routers whose IPFIX and BMP both arrived", "devices", x.wantDevices},
		{lab.Correctness, "real collectors share the work", "collectors", ">= 3"},
		{lab.Correctness, "both protocols were counted", "protocols", "== 2"},
		{lab.Correctness, "no router is split over collectors", "split_devices", "== 0"},
		{lab.Correctness, "nothing reached a collector other than the one named before", "misdirected", "== 0"},
		{lab.Correctness, "only routers of a dead collector are rejected", "rejected_other_slots", "== 0"},
		{lab.Correctness, "every record accepted was decoded and counted, router by router", "decode_errors", "== 0"},
		{lab.Correctness, "collectors were killed and returned under traffic", "restarts", fmt.Sprintf(">= %d", x.restarts)},
		{lab.Correctness, "after a storm every router is up at its collector", "storm_up", devices},
		{lab.Performance, "a returning collector is admitted within 100 ms of its last socket", "readmit_ms_p50", "< 100"},
	} {
		if c.kind == lab.Performance && x.env.Size == lab.Smoke {
			continue
		}
		r.Claim(c.kind, c.claim, c.metric, c.want)
	}
}

// chatter makes traffic between a real router and its neighbour, for the exporter to report.
func (x *experiment) chatter(ctx context.Context, site rig.RealSite) {
	go func() {
		d := routers.NewDialer(site.Router.Handle)
		defer d.Close()
		for ctx.Err() == nil {
			conn, err := d.Dial("udp", site.RouterBGP, netip.AddrPortFrom(site.Neighbour, 9))
			if err == nil {
				for range 10 {
					_, _ = conn.Write(make([]byte, 1400)) // discarded; big, see Router.startSoftflowd
				}
				conn.Close()
			}
			if pause(ctx, 100*time.Millisecond) != nil {
				return
			}
		}
	}()
}
