// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/ringbuf"
)

const (
	partnerPause = time.Second      // between attempts to connect
	tellAll      = 30 * time.Second // interval of complete reports: for lost records, and for flows idle at the partner and not here
	goneAfter    = time.Second      // an ended flow of the partner is removed here after this time without a packet
	// openFor is how long a move reported by the partner stays open here. If the partner dies during the move, the backends'
	// agents connect here. Their keepers hold the session for 30 s by default, so one of them can still acquire it. If the move
	// ended earlier, both backends would be rejected and would close their copies.
	openFor = 45 * time.Second
)

// exchange starts reporting flows to the partner. attend receives the partner's reports. Each side sends on its own outgoing connection.
func (a *Agent) exchange(ctx context.Context, wg *sync.WaitGroup) error {
	r, err := ringbuf.Open[bpf.LBLbFlowKey](a.f.maps.LbLearned)
	if err != nil {
		return fmt.Errorf("open the ring of learned flows: %w", err)
	}
	mark := a.pair.mark
	a.f.onChange.Store(&mark)
	a.f.news.Store(newsOfAll)
	if err := a.f.configure(); err != nil {
		r.Close()
		return err
	}
	wg.Go(func() { hearNews(ctx, r, a.pair) })
	wg.Go(func() { a.callPartner(ctx) })
	wg.Go(func() { a.watchPair(ctx) })
	return nil
}

func (d *pairing) mark(k Key) {
	d.mu.Lock()
	d.keys[k] = true
	d.mu.Unlock()
	wake(d.wake)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (d *pairing) drain() map[Key]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.keys
	d.keys = map[Key]bool{}
	return out
}

// hearNews marks flows learned by the data path until ctx is done.
func hearNews(ctx context.Context, r *ringbuf.Reader[bpf.LBLbFlowKey], d *pairing) {
	for k, err := range r.Events(ctx) {
		if err == nil {
			d.mark(flow.ParseKey(k))
		}
	}
}

// callPartner connects to the partner and reports flows, again after each failure, until ctx is done.
func (a *Agent) callPartner(ctx context.Context) {
	for ctx.Err() == nil {
		c, err := peer.Dial(ctx, a.o.Partner.Address, a.o.Partner.Name, a.o.TLS, a.own)
		if err == nil {
			a.o.Log.Info("partner connected", "name", a.o.Partner.Name)
			err = a.tellPartner(ctx, c)
			c.Close()
			a.o.Log.Warn("partner disconnected, not exchanging flows", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(partnerPause):
		}
	}
}

func (a *Agent) tellPartner(ctx context.Context, c *peer.Conn) error {
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := c.Receive(); err != nil { // pongs
				ended <- err
				return
			}
		}
	}()
	d := a.pair
	a.matchNews()
	all, ping, late := time.NewTicker(tellAll), time.NewTicker(pingEvery), time.NewTimer(wordTime)
	defer all.Stop()
	defer ping.Stop()
	defer late.Stop()
	wake(d.backends)
	wake(d.compare)
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err = <-ended:
		case <-late.C: // a partner of an older version does not report its backends
			if d.assume() {
				err = a.tellMoved(c)
			}
		case <-all.C:
			err = a.tellMoved(c)
		case <-d.compare:
			err = a.tellMoved(c)
		case <-d.backends:
			err = c.Tell(a.fit(a.pairWord()))
		case <-ping.C:
			if a.silent(c) {
				return errors.New("the partner does not answer")
			}
			err = c.Ping()
		case <-d.wake:
			if !d.knows() {
				continue // a later tellMoved repeats the signal
			}
			keys := d.drain()
			if err = a.sendFlows(c, keys, false); err != nil {
				for k := range keys { // for the next connection: nothing else reports ended flows
					d.mark(k)
				}
			}
		}
		if err != nil {
			return err
		}
	}
}

// tellMoved reports all flows that the partner's hash would not find.
func (a *Agent) tellMoved(c *peer.Conn) error {
	if !a.pair.knows() {
		return nil // the partner's report of its backends has not arrived yet
	}
	keys, here := map[Key]bool{}, map[Key]bool{}
	err := a.f.Flows(func(k Key, fl Flow) bool {
		here[k] = true
		if a.pair.wants(k, fl) {
			keys[k] = true
		}
		return true
	})
	if err != nil {
		return err
	}
	a.pair.forget(here)
	defer wake(a.pair.wake)
	return a.sendFlows(c, keys, true)
}

// sendFlows reports flows. all marks the report as complete.
func (a *Agent) sendFlows(c *peer.Conn, keys map[Key]bool, all bool) error {
	var records []peer.FlowRecord
	for k := range keys {
		fl, err := a.f.Flow(k)
		gone := errors.Is(err, errNoFlow)
		if err != nil && !gone {
			return err
		}
		if err == nil && (fl.Never(k) || fl.Unasked && a.f.unasked.Load()) && (fl.Epoch == 0 || !a.pair.knownBoth(k)) {
			continue // it may soon be forgotten here without notice to the partner; the data path reports it once it is open
		}
		if a.pair.tells(k, fl, gone) {
			records = append(records, newRecord(k, fl, gone))
		}
	}
	if len(records) == 0 && !all {
		return nil
	}
	a.pair.told.Add(uint64(len(records)))
	return c.TellFlows(records, all)
}

func newRecord(k Key, fl Flow, gone bool) peer.FlowRecord {
	return peer.FlowRecord{Flow: peer.Flow{Service: uint16(k.Service), Client: k.Client}, Owner: fl.Owner, To: fl.To, Epoch: fl.Epoch,
		Gone: gone, Age: since(fl.Seen)}
}

// since returns the time since a reading of the monotonic clock in ns.
func since(seen uint64) time.Duration {
	now := kernel.Monotonic()
	return time.Duration(now - min(now, seen))
}

func keyOfRecord(r peer.FlowRecord) Key {
	return Key{Client: r.Flow.Client, Service: int(r.Flow.Service)}
}

// hearPartner processes the partner's reports of backends and flows until its connection ends.
func (a *Agent) hearPartner(c *peer.Conn) {
	a.pair.hears(c, true)
	defer a.pair.hears(c, false)
	c.Handle(peer.Control{Peers: a.partnerSaid, Flows: func(records []peer.FlowRecord, last bool) {
		var err error
		for _, r := range records {
			err = errors.Join(err, a.adopt(r))
		}
		if err != nil {
			a.o.Log.Warn("cannot process flows of partner", "err", err)
		}
		a.pair.heard.Add(uint64(len(records)))
		if last {
			a.partnerToldAll()
		}
	}})
	for {
		if _, err := c.Receive(); err != nil {
			return
		}
	}
}

// adopt applies the partner's record of a flow if its epoch is later. If both have learned the flow at different backends in one
// epoch, the owner of the load balancer with the lesser name wins.
func (a *Agent) adopt(r peer.FlowRecord) error {
	if !r.Gone && r.Owner == 0 {
		return errors.New("a flow without an owner")
	}
	k := keyOfRecord(r)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !r.Gone && a.isOther(r.Owner) {
		return nil // the flows of one backend must not go to another one: weir lb status shows both
	}
	seen := kernel.Monotonic() - min(kernel.Monotonic(), uint64(r.Age))
	fl, err := a.f.Flow(k)
	a.pair.knownThere(k, r.Gone, err == nil && !r.Gone && fl.Epoch > r.Epoch)
	switch {
	case errors.Is(err, errNoFlow) && r.Gone:
		return nil
	case errors.Is(err, errNoFlow):
		if err := a.f.learn(k, moved(r, 0), seen, flow.Told); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
		a.watchMove(r)
		return nil
	case err != nil:
		return err
	case fl.Buffered || fl.Buffering: // a move is in progress here
		return nil
	case r.Gone:
		if fl.Ended {
			return a.over(k, fl.Seen)
		}
		// This may be a new connection between the same ends. It then has further packets.
		a.after(goneAfter, func() {
			if err := a.over(k, fl.Seen); err != nil {
				a.o.Log.Warn("cannot forget flow ended at partner", "err", err)
			}
		})
		return nil
	}
	_, err = a.f.change(k, 0, seen, func(now *Flow) {
		switch {
		case r.Epoch > now.Epoch, r.Epoch == now.Epoch && r.Owner != now.Owner && a.o.Partner.Name < a.o.Name:
			now.Flow, now.Incarnation = moved(r, now.Nonce), 0
		case r.Epoch == now.Epoch && r.Owner == now.Owner && r.To != 0:
			now.To = r.To // from now on no reset of its backend passes
		}
	})
	if errors.Is(err, errNoFlow) {
		return nil // it has ended meanwhile
	}
	a.watchMove(r)
	return err
}

// moved returns the owners of a record, with nonce b.
func moved(r peer.FlowRecord, b move.Nonce) move.Flow {
	return move.Flow{Owner: r.Owner, To: r.To, Epoch: r.Epoch, Nonce: b}
}

// over removes a flow ended at the partner, if it has had no packet here since seen. The caller holds mu.
func (a *Agent) over(k Key, seen uint64) error {
	fl, err := a.f.Flow(k)
	if errors.Is(err, errNoFlow) || err == nil && (fl.Seen != seen || fl.To != 0 || fl.Buffered || fl.Pinned) {
		return nil
	} else if err != nil {
		return err
	}
	if err := a.f.maps.LbFlows.Delete(k.Raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget the flow of %s: %w", k.Client, err)
	}
	a.f.changed(k) // the partner may have received it in a report after it saw the end
	return nil
}

// watchMove ends a move reported by the partner if no further report arrives, see openFor. The epoch stays, because it belongs to
// the partner. The caller holds mu.
func (a *Agent) watchMove(r peer.FlowRecord) {
	k := keyOfRecord(r)
	if r.To == 0 {
		return
	}
	if t := a.timers[k]; t != nil {
		t.Stop()
	}
	a.timers[k] = a.after(a.openFor, func() {
		delete(a.timers, k)
		_, err := a.f.change(k, 0, 0, func(fl *Flow) {
			if fl.Epoch == r.Epoch && !fl.Buffering {
				fl.To = 0
			}
		})
		if err != nil && !errors.Is(err, errNoFlow) {
			a.o.Log.Warn("cannot end move of partner", "flow", k.Client, "err", err)
		}
	})
}
