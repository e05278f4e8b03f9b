// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// stage is one steered service with its collectors, its routers and their ledger. A run has one stage of
// nfacctd and several of fast sinks, each on its own port.
type stage struct {
	env        *lab.Env
	result     *lab.Result
	world      *rig.World
	weir       *rig.Weir // nil in the control run
	name       string
	port       uint16
	silent     bool               // no log lines from this stage
	rand       *rand.Rand         // for one goroutine
	collectors []*peers.Collector // by slot; the last may be spare
	fleet      *routers.Fleet
	ledger     *ledger
	service    *rig.Service
	sockets    *rig.SocketWatch
	spans      []span
	lostBase   []uint64     // packets weir kept from each slot, at the last query
	revived    map[int]bool // slots restarted since then because of a deaf or crashed collector: see revive
	kills      kills
	routers    routers.Config // of a stage of fast sinks
	resizes    resized        // sum over all changes of its number of slots

	mu         sync.Mutex // guards the fields below, because several collectors return at a time
	plain      *ledger    // of the devices sending before weir starts
	readmits   []time.Duration
	admissions []admission
	restarted  int
}

// kills describes the kills of a stage's collectors.
type kills struct {
	restarts int           // in total
	together int           // maximum of collectors down at the same time
	apart    time.Duration // maximum between two kills of a round
	down     time.Duration // average from the end of a collector to its restart
}

// watch starts watching the sockets on the stage's port.
func (s *stage) watch() {
	s.sockets = rig.WatchSockets(s.world.Collectors.Handle, s.port)
	s.env.OnClose(s.sockets.Stop)
}

// serves turns the stage's collectors into a service of weir.
func (s *stage) serves(engine string, listen ...string) {
	s.service = &rig.Service{Name: s.name, Collectors: s.collectors, Listen: listen, Engine: engine}
	s.weir.Add(s.service)
}

// admitted waits until every slot holds its collector, and starts counting the packets weir keeps from
// them.
func (s *stage) admitted(ctx context.Context) error {
	if err := s.service.Admitted(ctx, 60*time.Second); err != nil {
		return err
	}
	var err error
	s.lostBase, err = s.lost(ctx)
	return err
}

// newFleet creates the routers of the stage and their ledger. They do not send yet.
func (s *stage) newFleet(ctx context.Context, cfg routers.Config, real []netip.Addr) error {
	cfg.To4, cfg.To6 = netip.AddrPortFrom(rig.Service4, s.port), netip.AddrPortFrom(rig.Service6, s.port)
	cfg.NS = s.world.Routers.Handle
	cfg.Notice = func(e routers.Event) { s.ledger.notice(e) }
	fleet, err := routers.New(cfg)
	if err != nil {
		return err
	}
	ledger := newLedger(s.result, fleet, real)
	s.mu.Lock()
	s.fleet, s.ledger = fleet, ledger // from here on the collectors' output is read
	s.mu.Unlock()
	return s.askWhere(ctx)
}

// send starts the routers and waits until all are up at their collectors. IPFIX begins after the BMP
// sessions are up: see revive.
func (s *stage) send(ctx context.Context) error { return all(ctx, s.connect, s.flow) }

// connect starts the routers and waits for the BMP sessions.
func (s *stage) connect(ctx context.Context) error {
	s.fleet.Silence(true)
	s.fleet.Start(ctx)
	s.env.OnClose(s.fleet.Stop)
	return s.sessionsUp(ctx, 60*time.Second)
}

// flow starts IPFIX and waits until all routers are up.
func (s *stage) flow(ctx context.Context) error {
	s.fleet.Silence(false)
	if err := s.allUp(ctx, nil, 60*time.Second); err != nil {
		return err
	}
	if err := s.taught(ctx, 60*time.Second); err != nil {
		return err
	}
	s.endEpoch(nil) // no slot counts as calm in the epoch of the collectors' start
	for _, c := range s.collectors {
		s.ledger.calm(c.Number)
	}
	return nil
}

// sessionsUp waits until the collectors have logged the Peer Up of every simulated router's session.
func (s *stage) sessionsUp(ctx context.Context, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		down := 0
		s.ledger.mu.Lock()
		for i, a := range s.ledger.accounts[:len(s.fleet.Devices)] {
			if !s.sessionUp(i, a) {
				down++
			}
		}
		s.ledger.mu.Unlock()
		if down == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d routers have no BMP session at their collectors after %s", down, limit)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// taught waits until weir knows the template of every sparse router. It makes a router repeat a template
// missed by weir. The service is seconds old, and weir serve may have begun to listen after the routers
// began to send.
func (s *stage) taught(ctx context.Context, limit time.Duration) error {
	if s.weir == nil {
		return nil
	}
	for deadline := time.Now().Add(limit); ; {
		known, err := s.service.Exporters(ctx)
		if err != nil {
			return err
		}
		unheard := 0
		for i, d := range s.fleet.Devices {
			if s.fleet.Sparse(i) && !known[d.Addr] {
				s.fleet.Remind(i)
				unheard++
			}
		}
		if unheard == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("weir does not know the templates of %d routers after %s; see weir-serve.log", unheard, limit)
		}
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
	}
}

// askWhere records weir's answer for every device's slot as the expected slot. It must not have changed.
func (s *stage) askWhere(ctx context.Context) error {
	if s.weir == nil {
		return nil
	}
	slots, err := s.service.Where(ctx, s.ledger.addrs())
	if err != nil {
		return err
	}
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for _, a := range s.ledger.accounts {
		slot := slots[a.addr]
		if a.slot != unknown && a.slot != slot {
			return fmt.Errorf("weir steer where: the slot of %s changed from %d to %d", a.addr, a.slot, slot)
		}
		a.slot = slot
	}
	return nil
}

// say logs a line, except for silent stages.
func (s *stage) say(format string, a ...any) {
	if !s.silent {
		s.env.Watch.Log(format, a...)
	}
}

// books returns the ledgers of records.
func (s *stage) books() (ledger, plain *ledger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger, s.plain
}

// readers starts reading the collectors' output several times a second, and returns a function to stop it.
func (s *stage) readers() func() {
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
			s.read()
		}
	}()
	return func() { close(stop); <-done }
}

func (s *stage) read() {
	ledger, plain := s.books()
	if ledger == nil {
		ledger = plain
	}
	if ledger == nil {
		return
	}
	for _, c := range s.collectors {
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

// pause waits for d, or for the end of the run.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
