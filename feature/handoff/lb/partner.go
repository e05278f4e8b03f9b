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
	tellAll      = 30 * time.Second // all that is known: what was lost, and what is not idle elsewhere
	goneAfter    = time.Second      // without a packet here a flow is over whose end the other load balancer has seen
	// openFor is how long a move that the partner has told of stays open here. If the partner dies in its midst, the backends' agents
	// come here, and the session is theirs to have as long as their keepers hold it, 30 s by default: were the move over before,
	// both would be told no, and close their copies.
	openFor = 45 * time.Second
)

// exchange tells the partner of flows, and hears of its own by attend. Each side sends over the connection that it has made.
func (a *Agent) exchange(ctx context.Context, wg *sync.WaitGroup) error {
	r, err := ringbuf.Open[bpf.LBLbFlowKey](a.f.maps.LbLearned)
	if err != nil {
		return fmt.Errorf("hearing of new flows: %w", err)
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

// drain empties it.
func (d *pairing) drain() map[Key]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.keys
	d.keys = map[Key]bool{}
	return out
}

// hearNews marks flows that the data path learns, until ctx is done.
func hearNews(ctx context.Context, r *ringbuf.Reader[bpf.LBLbFlowKey], d *pairing) {
	for k, err := range r.Events(ctx) {
		if err == nil {
			d.mark(flow.ParseKey(k))
		}
	}
}

// callPartner connects to the partner, whenever it is there, and tells it of flows.
func (a *Agent) callPartner(ctx context.Context) {
	for ctx.Err() == nil {
		c, err := peer.Dial(ctx, a.o.Partner.Address, a.o.Partner.Name, a.o.TLS, a.own)
		if err == nil {
			a.o.Log.Info("the partner is connected", "name", a.o.Partner.Name)
			err = a.tellPartner(ctx, c)
			c.Close()
			a.o.Log.Warn("the partner is not connected any more: flows are not exchanged", "err", err)
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
		case <-late.C: // an older weir's says nothing of its backends
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
				return errors.New("it says nothing")
			}
			err = c.Ping()
		case <-d.wake:
			if !d.knows() {
				continue // tellMoved says so again
			}
			keys := d.drain()
			if err = a.sendFlows(c, keys, false); err != nil {
				for k := range keys { // the next connection's: of what has ended nothing else tells
					d.mark(k)
				}
			}
		}
		if err != nil {
			return err
		}
	}
}

// tellMoved tells of all flows that the partner would not find by its hash.
func (a *Agent) tellMoved(c *peer.Conn) error {
	if !a.pair.knows() {
		return nil // its word is on its way
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

// sendFlows tells of flows. all: these are all that there are to tell.
func (a *Agent) sendFlows(c *peer.Conn, keys map[Key]bool, all bool) error {
	var records []peer.FlowRecord
	for k := range keys {
		fl, err := a.f.Flow(k)
		gone := errors.Is(err, errNoFlow)
		if err != nil && !gone {
			return err
		}
		if err == nil && (fl.Never(k) || fl.Unasked && a.f.unasked.Load()) && (fl.Epoch == 0 || !a.pair.knownBoth(k)) {
			continue // the other one would not know that it is soon forgotten; once it is open the data path says so
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

// since is how long ago a moment of the monotonic clock was.
func since(seen uint64) time.Duration {
	now := kernel.Monotonic()
	return time.Duration(now - min(now, seen))
}

// keyOfRecord is the flow that a record is about.
func keyOfRecord(r peer.FlowRecord) Key {
	return Key{Client: r.Flow.Client, Service: int(r.Flow.Service)}
}

// hearPartner takes what the partner tells of backends and flows, as long as it is connected.
func (a *Agent) hearPartner(c *peer.Conn) {
	a.pair.hears(c, true)
	defer a.pair.hears(c, false)
	c.Handle(peer.Control{Peers: a.partnerSaid, Flows: func(records []peer.FlowRecord, last bool) {
		var err error
		for _, r := range records {
			err = errors.Join(err, a.adopt(r))
		}
		if err != nil {
			a.o.Log.Warn("flows of the partner", "err", err)
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

// adopt takes what the partner knows of a flow, where it is later: the epoch says so. Two that have learned a flow at once, at
// different backends, keep to the one whose name comes first.
func (a *Agent) adopt(r peer.FlowRecord) error {
	if !r.Gone && r.Owner == 0 {
		return errors.New("a flow without an owner")
	}
	k := keyOfRecord(r)
	a.mu.Lock()
	defer a.mu.Unlock()
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
	case fl.Buffered || fl.Buffering: // it is being moved here
		return nil
	case r.Gone:
		if fl.Ended {
			return a.over(k, fl.Seen)
		}
		// It may be a new one between the same ends: then more is seen of it.
		a.after(goneAfter, func() {
			if err := a.over(k, fl.Seen); err != nil {
				a.o.Log.Warn("a flow that the partner has seen end stays known", "err", err)
			}
		})
		return nil
	}
	_, err = a.f.change(k, 0, seen, func(now *Flow) {
		switch {
		case r.Epoch > now.Epoch, r.Epoch == now.Epoch && r.Owner != now.Owner && a.o.Partner.Name < a.o.Name:
			now.Flow, now.Incarnation = moved(r, now.Nonce), 0
		case r.Epoch == now.Epoch && r.Owner == now.Owner && r.To != 0:
			now.To = r.To // from here on no reset of its backend passes
		}
	})
	if errors.Is(err, errNoFlow) {
		return nil // it has ended meanwhile
	}
	a.watchMove(r)
	return err
}

// moved is what a record says of a flow's owner.
func moved(r peer.FlowRecord, b move.Nonce) move.Flow {
	return move.Flow{Owner: r.Owner, To: r.To, Epoch: r.Epoch, Nonce: b}
}

// over forgets a flow whose end the partner has seen, if nothing has been seen of it here since. The caller holds mu.
func (a *Agent) over(k Key, seen uint64) error {
	fl, err := a.f.Flow(k)
	if errors.Is(err, errNoFlow) || err == nil && (fl.Seen != seen || fl.To != 0 || fl.Buffered || fl.Pinned) {
		return nil
	} else if err != nil {
		return err
	}
	if err := a.f.maps.LbFlows.Delete(k.Raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forgetting the flow of %s: %w", k.Client, err)
	}
	a.f.changed(k) // the partner may have been told of it again since it has seen the end
	return nil
}

// watchMove ends a move that the partner has told of and says nothing more about, see openFor. The epoch stays: it is the partner's.
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
			a.o.Log.Warn("a move of the partner's stays open", "flow", k.Client, "err", err)
		}
	})
}
