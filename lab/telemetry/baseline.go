// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"net/netip"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// plain4 is the source address of the first device without weir. These devices differ from the later ones
// with weir.
var plain4 = netip.MustParseAddr("10.99.128.1")

// baseline measures the state without weir. The collectors share the port by SO_REUSEPORT, and the kernel
// distributes packets by a hash of addresses and ports.
func (x *experiment) baseline(ctx context.Context) error {
	if x.plan.plain == 0 || x.env.Control {
		return nil
	}
	x.say("first without weir: %d routers send to the shared port; the kernel's own hash chooses a collector for each stream", x.plan.plain)
	fleet, err := routers.New(routers.Config{
		Devices: x.plan.plain, First4: plain4, First6: rig.Devices6.Addr(), To4: netip.AddrPortFrom(rig.Service4, rig.Port),
		Rate: 5, Records: 3, Refresh: 1, Retry: time.Second, NS: x.world.Routers.Handle,
		Ramp: 15 * time.Millisecond, // nfacctd's backlog is 1
	})
	if err != nil {
		return err
	}
	// Notes about these devices belong to no result.
	ledger := newLedger(lab.NewResult("", x.env.Size, 0), fleet, nil)
	x.mu.Lock()
	x.plain = ledger
	x.mu.Unlock()
	fleet.Silence(true) // until the sessions are up: see revive
	fleet.Start(ctx)
	x.env.OnClose(fleet.Stop)
	if err := x.await(ctx, ledger.sessions); err != nil {
		return err
	}
	fleet.Silence(false)
	if err := x.await(ctx, ledger.arrived); err != nil {
		return err
	}
	fleet.Silence(true) // see storm
	if err := x.sockets.Drained(ctx, drainLimit); err != nil {
		return err
	}
	arrived, split := ledger.arrived(), ledger.split()
	fleet.Stop()
	x.result.Set("baseline_devices", float64(arrived))
	x.result.Set("baseline_split_devices", float64(split))
	x.say("without weir %d of %d routers are split: IPFIX at one collector, BMP at another", split, arrived)
	return x.survivors(ctx)
}

// await waits for a complete count of the routers without weir, for at most 8 s. Without weir the count may
// stay incomplete.
func (x *experiment) await(ctx context.Context, count func() int) error {
	limit := time.Now().Add(8 * time.Second)
	for count() < x.plan.plain && time.Now().Before(limit) {
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// survivors restarts collectors after a crash at the end of the sessions; see storm.
func (x *experiment) survivors(ctx context.Context) error {
	if err := pause(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	for _, c := range x.collectors {
		if c.Running() {
			continue
		}
		x.say("collector %d crashed at the end of the sessions; restarting it", c.Number)
		if err := c.Start(); err != nil {
			return err
		}
		if err := x.appear(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// sessions counts the devices with a Peer Up in any log.
func (l *ledger) sessions() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, a := range l.accounts {
		if a.peerUps > 0 {
			n++
		}
	}
	return n
}

// arrived counts the devices with both protocols counted at any collector.
func (l *ledger) arrived() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, a := range l.accounts {
		if a.total[routers.IPFIX] > 0 && a.total[routers.BMP] > 0 {
			n++
		}
	}
	return n
}

// split counts the devices with records at more than one collector.
func (l *ledger) split() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, a := range l.accounts {
		if len(a.at) > 1 {
			n++
		}
	}
	return n
}
