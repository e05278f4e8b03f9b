// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab/rig"
)

// stormLimit is the longest time until the last router is up again.
const stormLimit = 60 * time.Second

// storm makes every router end its BMP session and reconnect at the same moment, as after a line failure.
// The devices are counted at the collectors, because a router believes itself up even if its connection
// died in a full backlog.
//
// IPFIX is silent meanwhile. nfacctd 1.7.7 looks up the BMP session of each flow record's sender. It
// crashes if another thread closes this session at the same moment.
func (x *experiment) storm(ctx context.Context) error {
	if err := x.silence(ctx, true); err != nil {
		return err
	}
	x.say("storm: all %d routers drop their BMP session and reconnect at the same moment", len(x.ledger.accounts))
	calm := x.ledger.undisturbed(len(x.collectors))
	before := x.endEpoch(calm)
	ups, closes := x.realUps(), x.closes()
	open := x.fleet.Up() + len(x.real)
	begin := time.Now()
	sessions := x.fleet.Storm()
	if err := x.resetReal(); err != nil {
		return err
	}
	total, longest := len(x.ledger.accounts), time.Duration(0)
	up := 0
	for up < total && time.Since(begin) < stormLimit {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		if n := x.upSince(sessions, ups); n > up {
			up, longest = n, time.Since(begin)
		}
	}
	x.result.Set("storm_up", float64(up))
	x.result.Set("storm_s", longest.Seconds())
	x.say("%d of %d routers are up again at their collectors after %.1f s", up, total, longest.Seconds())
	if up < total {
		missing, example := x.notUp(nil)
		x.result.Note("%d routers are not up after the storm; for example %s", missing, example)
	}
	for begin = time.Now(); x.closes()-closes < open && time.Since(begin) < drainLimit; {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	if err := x.silence(ctx, false); err != nil {
		return err
	}
	if err := x.ledger.drain(ctx, before.epoch, before.calm, drainLimit); err != nil {
		return err
	}
	if err := x.rejectsElsewhere(ctx, nil); err != nil {
		return err
	}
	during := x.endEpoch(calm)
	return x.ledger.drain(ctx, during.epoch, during.calm, drainLimit)
}

// silence stops IPFIX and waits until the collectors have read the sent messages, or resumes it.
func (x *experiment) silence(ctx context.Context, on bool) error {
	for _, r := range x.real {
		r.Silence(on)
	}
	x.fleet.Silence(on)
	if !on {
		return nil
	}
	return x.sockets.Drained(ctx, drainLimit)
}

// closes returns the number of session ends in the collectors' logs.
func (s *stage) closes() int {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	return s.ledger.closes
}

// realUps returns the number of Peer Ups in each account's collector log.
func (s *stage) realUps() []int {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	var n []int
	for _, a := range s.ledger.accounts {
		n = append(n, a.peerUps)
	}
	return n
}

// upSince counts the devices with a logged Peer Up of a session newer than the storm.
func (s *stage) upSince(sessions, ups []int) int {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	up := 0
	for i, a := range s.ledger.accounts {
		if a.real && a.peerUps > ups[i] || !a.real && a.session >= sessions[i] {
			up++
		}
	}
	return up
}

// resetReal resets the BMP connections of the real routers.
func (x *experiment) resetReal() error {
	for i := range x.real {
		err := x.world.Real[i].Router.Do(func() error {
			sockets, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_ESTABLISHED})
			if err != nil {
				return err
			}
			for _, s := range sockets {
				if s.Remote.Port() == rig.Port {
					if err := sockdiag.Destroy(s); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
