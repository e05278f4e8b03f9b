// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab/peers"
)

// drainLimit is how long a record may take from the wire to the collector's file. nfacctd writes once a
// second; a collector that works off hundreds of closed sessions first takes longer.
const drainLimit = 20 * time.Second

// endEpoch ends the epoch, notes which slots were calm from its begin to its end, and begins the next.
// calmAtBegin is what undisturbed returned when it began.
func (x *experiment) endEpoch(calmAtBegin map[int]bool) span {
	calm := x.ledger.undisturbed(len(x.collectors))
	for slot := range calm {
		calm[slot] = calm[slot] && calmAtBegin[slot]
	}
	s := span{epoch: x.fleet.Advance(), calm: calm}
	x.spans = append(x.spans, s)
	return s
}

// quietly lets everyone send undisturbed for a while, and checks that every record arrives.
func (x *experiment) quietly(ctx context.Context) error {
	x.say("all is calm: every record sent must be counted, at the one collector that weir names")
	calm := x.ledger.undisturbed(len(x.collectors))
	if err := pause(ctx, x.quiet); err != nil {
		return err
	}
	s := x.endEpoch(calm)
	return x.ledger.drain(ctx, s.epoch, s.calm, drainLimit)
}

// allUp waits until the collectors of the slots (nil: of all) have logged the Peer Up of every device, on the
// session that the device holds now, and counted an IPFIX record of it since they started: nfacctd's own
// parts come up one by one. It returns an error after the limit. A device's own opinion of its session is
// not enough: a full backlog completes the handshake for the device alone.
func (x *experiment) allUp(ctx context.Context, slots map[int]bool, limit time.Duration) error {
	begin := time.Now()
	for deadline := begin.Add(limit); ; {
		missing, example := x.notUp(slots)
		if missing == 0 {
			return nil
		}
		for _, c := range x.collectors {
			if (slots == nil || slots[c.Number]) && time.Since(begin) > deafAfter && x.deaf(c) {
				if err := x.revive(ctx, c); err != nil {
					return err
				}
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d routers have not reached their collectors with both protocols after %s, %s for one", missing, limit, example)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// deafAfter is how long a collector may take to write its first flow record; it writes once a second.
const deafAfter = 6 * time.Second

// deaf tells whether a collector holds BMP sessions and counted no flow record at all since it started: in one
// of a hundred starts on a busy machine nfacctd's plugin fails to connect to its core, without a word.
func (x *experiment) deaf(c *peers.Collector) bool {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	held := false
	for i, a := range x.ledger.accounts {
		if a.slot != c.Number || a.real {
			continue
		}
		if a.life == c.Life() {
			return false
		}
		session, up := x.fleet.Session(i)
		held = held || up && a.session >= session
	}
	return held && c.Running()
}

// revive restarts a deaf collector, as whoever watches it would.
func (x *experiment) revive(ctx context.Context, c *peers.Collector) error {
	x.say("collector %d takes BMP but writes no flows: nfacctd's plugin did not find its core; it is restarted", c.Number)
	x.ledger.disturb(c.Number)
	x.ledger.deafStart()
	v := victim{Collector: c, signal: syscall.SIGKILL}
	if err := v.Kill(v.signal); err != nil {
		return err
	}
	return x.bringBack(ctx, v)
}

func (x *experiment) notUp(slots map[int]bool) (missing int, example string) {
	x.ledger.mu.Lock()
	defer x.ledger.mu.Unlock()
	for i, a := range x.ledger.accounts {
		if slots != nil && !slots[a.slot] {
			continue
		}
		ok := a.peerUps > 0
		if !a.real {
			session, up := x.fleet.Session(i)
			ok = up && a.session >= session && (a.slot == unknown || a.life == x.collectors[a.slot].Life())
		}
		if !ok {
			missing++
			example = a.addr.String()
		}
	}
	return missing, example
}

// readers begins to read what collectors write, several times a second, and returns what ends it.
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
			x.read()
		}
	}()
	return func() { close(stop); <-done }
}

func (x *experiment) read() {
	x.view.lock()
	plain, ledger := x.plain, x.ledger
	x.view.unlock()
	if ledger == nil {
		ledger = plain
	}
	if ledger == nil {
		return
	}
	for _, c := range x.collectors {
		err := c.Poll(func(r peers.Record) {
			if plain != nil && plain.byAddr[r.Device] != nil {
				plain.book(c.Number, r)
			} else {
				ledger.book(c.Number, r)
			}
		})
		if err != nil {
			ledger.book(c.Number, peers.Record{Kind: peers.Odd, Count: 1, Text: err.Error()})
		}
	}
}
