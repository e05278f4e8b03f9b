// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// slice is the number of routers connecting at once; see window.
const slice = 64

// Routers do not send in step: a few send, then a gap follows. 512 routers at 10 messages a second each
// send 5,000 a second and protocol this way. Bursts would wake HAProxy and the tee for many messages at a
// time, and they would look cheaper than at this rate.
const (
	few = 4
	gap = 800 * time.Microsecond
)

// countLimit is the longest time until a message is counted. deafAfter is the longest time until a
// collector's first flow record; it writes once a second.
const (
	countLimit = 90 * time.Second
	deafAfter  = 8 * time.Second
)

// nudge is the epoch of uncounted messages. nfacctd keeps the last records in a buffer until more follow.
const nudge = 0

// open creates the lanes of every router on every way, and waits until all BMP sessions are up at their
// collectors.
func (x *experiment) open(ctx context.Context) error {
	x.say("%d routers connect to the collectors by each of %d ways", len(x.devices), len(x.ways))
	for _, y := range x.ways {
		for i, d := range x.devices {
			l := &lane{dev: routers.NewDevice(i, d), collector: x.collectors[d], dial: x.dialer, to: y.target(x.collectors[d])}
			y.lanes = append(y.lanes, l)
			if err := l.open(ctx); err != nil {
				return err
			}
			x.holders.Go(func() { l.keepUp(x.holding) })
			if i%slice == slice-1 { // the wire must not lose any
				if err := pause(ctx, 5*time.Millisecond); err != nil {
					return err
				}
			}
		}
	}
	most := 0
	for last := time.Now(); ; {
		up, total := 0, 0
		for _, y := range x.ways {
			up, total = up+y.tally.up(), total+len(y.lanes)
		}
		if up == total {
			return x.warm(ctx)
		}
		if up > most {
			most, last = up, time.Now()
		}
		if time.Since(last) > countLimit {
			return fmt.Errorf("%d of %d sessions are up at the collectors, with no progress for %s", up, total, countLimit)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// warm sends an unmeasured round: collectors learn templates and fill their tables. In one of a hundred
// starts nfacctd's plugin does not find its core and writes nothing, without a message. warm restarts such
// a collector, like an operator would.
func (x *experiment) warm(ctx context.Context) error {
	x.epoch++
	for _, y := range x.ways {
		if err := x.sweep(ctx, y, true); err != nil {
			return err
		}
	}
	since := map[*peers.Collector]time.Time{}
	for begin := time.Now(); ; {
		deaf := 0
		for _, y := range x.ways {
			for i, c := range y.collectors {
				if y.tally.hears(c) {
					continue
				}
				deaf++
				if since[c].IsZero() {
					since[c] = time.Now()
				}
				if time.Since(since[c]) > deafAfter {
					if err := x.revive(ctx, y, i); err != nil {
						return err
					}
					if err := x.sweep(ctx, y, true); err != nil { // it has no template yet
						return err
					}
					delete(since, c)
				}
			}
		}
		if deaf == 0 {
			return nil
		}
		if time.Since(begin) > 2*returnLimit {
			return fmt.Errorf("%d collectors write no flow records", deaf)
		}
		x.push(ctx)
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
}

// revive restarts a deaf collector.
func (x *experiment) revive(ctx context.Context, y *way, i int) error {
	x.say("%s of %s writes no flows: its plugin did not find its core; restarting it", y.collectors[i], y.name)
	x.result.Note("a collector of %s had to be started twice", y.name)
	before := y.ups(i)
	if err := x.restart(ctx, y, i); err != nil {
		return err
	}
	return x.reopened(ctx, y, before)
}

// restart kills a collector and starts it again. It returns when the collector has its sockets.
func (x *experiment) restart(ctx context.Context, y *way, i int) error {
	c := y.collectors[i]
	if err := c.Kill(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-c.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	var err error
	for range 3 {
		if err = y.launch(c); err != nil {
			return err
		}
		// It may crash while it comes up: see storm.go about nfacctd and closing sessions.
		if err = y.ready(ctx, i); err == nil || c.Running() || ctx.Err() != nil {
			return err
		}
		x.result.Note("%s of %s ended by itself: %v", c, y.name, err)
	}
	return err
}

// sweep sends one IPFIX message and one route from every router.
func (x *experiment) sweep(ctx context.Context, y *way, template bool) error {
	for i, l := range y.lanes {
		switch phase := y.flows.Load(); {
		case phase == flowing || l.collector != 0:
			l.flows(ctx, x.epoch, template)
		case phase == hopeless:
			l.count(x.epoch)[0] += records
		}
		l.route(x.epoch)
		if i%few == few-1 {
			if err := pause(ctx, gap); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure sends the same messages by every way in turn, and records the total cost of a message by each. It
// includes collectors, intermediaries, and the network stack of their host.
func (x *experiment) measure(ctx context.Context) error {
	x.say("%d rounds of %d messages by each way in turn, until every one is counted", x.rounds, 2*x.sweeps*len(x.devices))
	serve, err := cpuTime(x.serve.PID)
	if err != nil {
		return err
	}
	if err := x.idle(ctx); err != nil {
		return err
	}
	var wires []time.Duration
	for _, y := range x.ways {
		wire, _ := cpuTime(y.wire)
		wires = append(wires, wire)
	}
	for round := range x.rounds {
		x.epoch++
		before, err := x.cpu()
		if err != nil {
			return err
		}
		// Sweep by sweep, a slow second of the machine slows all ways.
		for sweep := range x.sweeps {
			for i := range x.ways {
				if err := x.sweep(ctx, x.ways[(round+sweep+i)%len(x.ways)], false); err != nil {
					return err
				}
			}
		}
		if err := x.counted(ctx); err != nil {
			return err
		}
		after, err := x.cpu()
		if err != nil {
			return err
		}
		for i, y := range x.ways {
			us := float64((after[i] - before[i]).Nanoseconds()) / 1000
			x.total[y.name] = append(x.total[y.name], us/float64(2*x.sweeps*len(x.devices)))
		}
	}
	if len(x.ways) == 0 {
		return nil
	}
	for i, y := range x.ways {
		wire, err := cpuTime(y.wire)
		if err != nil {
			return err
		}
		x.result.Set("us_total_"+y.name+"_wire", float64((wire-wires[i]).Nanoseconds())/1000/float64(2*x.rounds*x.sweeps*len(x.devices)))
	}
	now, err := cpuTime(x.serve.PID)
	x.result.Set("us_total_weir_serve", float64((now-serve).Nanoseconds())/1000/float64(2*x.rounds*x.sweeps*len(x.devices)))
	return err
}

// idle records the cost of each way without traffic, in ms of CPU time a second. It is part of a message's
// cost.
func (x *experiment) idle(ctx context.Context) error {
	const seconds = 2
	before, err := x.cpu()
	if err != nil {
		return err
	}
	if err := pause(ctx, seconds*time.Second); err != nil {
		return err
	}
	after, err := x.cpu()
	if err != nil {
		return err
	}
	for i, y := range x.ways {
		x.result.Set("idle_ms_"+y.name, ms(after[i]-before[i])/seconds)
	}
	return nil
}

// cpuTime returns the CPU time of a process so far (its CPU clock: CPUCLOCK_SCHED in linux/posix-timers.h).
func cpuTime(pid int) (time.Duration, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(int32(^pid<<3|2), &ts)
	return time.Duration(ts.Nano()), err
}

// cpu returns each way's CPU time so far.
func (x *experiment) cpu() ([]time.Duration, error) {
	var all []time.Duration
	for _, y := range x.ways {
		used, err := y.site.cpu()
		if err != nil {
			return nil, err
		}
		all = append(all, used)
	}
	return all, nil
}

// counted waits until all records of the epoch are counted, and records the missing ones. Excess records (a
// tee sending twice) are as wrong as missing ones.
func (x *experiment) counted(ctx context.Context) error {
	for begin, next := time.Now(), time.Now().Add(500*time.Millisecond); ; {
		short := false
		for _, y := range x.ways {
			missing, _ := x.missing(y, nil)
			short = short || missing[0]+missing[1] > 0
		}
		if !short || time.Since(begin) > countLimit {
			break
		}
		if time.Now().After(next) {
			x.push(ctx)
			next = time.Now().Add(200 * time.Millisecond)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	for _, y := range x.ways {
		missing, surplus := x.missing(y, nil)
		x.miscounted[y.name] += missing[0] + missing[1] + surplus
		if missing[0]+missing[1]+surplus > 0 {
			x.result.Note("epoch %d, %s: %d flow records and %d routes were not counted, %d records in excess", x.epoch, y.name, missing[0], missing[1], surplus)
		}
	}
	return nil
}

// missing compares sent with counted records of a way in the epoch, for the routers of one collector or
// (nil) of all.
func (x *experiment) missing(y *way, collector *int) (missing [2]int, surplus int) {
	for _, l := range y.lanes {
		if collector != nil && l.collector != *collector {
			continue
		}
		for i, p := range []routers.Protocol{routers.IPFIX, routers.BMP} {
			n := l.count(x.epoch)[i] - y.tally.of(p, x.epoch, l.dev.Addr)
			missing[i] += max(n, 0)
			surplus += max(-n, 0)
		}
	}
	return missing, surplus
}

// push sends some uncounted messages to every collector.
func (x *experiment) push(ctx context.Context) {
	for _, y := range x.ways {
		pushed := map[int]bool{}
		for _, l := range y.lanes {
			if pushed[l.collector] {
				continue
			}
			pushed[l.collector] = true
			for range 24 {
				l.buf = l.dev.IPFIX(l.buf[:0], l.seq, true, 16, nudge, time.Now())
				_ = sendDatagram(ctx, l.udp, l.buf)
				l.seq += 16
			}
		}
	}
}

// readers reads the collectors' output several times a second, until stopped.
func (x *experiment) readers() func() {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			for _, y := range x.reading() {
				for _, c := range y.collectors {
					if err := c.Poll(func(r peers.Record) { y.tally.book(c.Number, r) }); err != nil {
						y.tally.book(c.Number, peers.Record{Kind: peers.Odd, Count: 1, Text: err.Error()})
					}
				}
			}
		}
	}()
	return func() { close(stop); <-done }
}

// behind returns the addresses of the collectors of the existing way.
func (s *site) behind() []netip.AddrPort {
	var to []netip.AddrPort
	for i := range collectorsEach {
		to = append(to, netip.AddrPortFrom(s.addr, uint16(port+1+i)))
	}
	return to
}
