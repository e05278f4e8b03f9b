// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/kernel"
)

// Partner is another front end, as the agents of both know each other.
type Partner struct {
	Name    string `yaml:"name"`    // in its certificate
	Address string `yaml:"address"` // host:port where its agent listens
}

const (
	partnerPause = time.Second      // between attempts to connect
	tellAll      = 30 * time.Second // all that is known: what was lost, and what is not idle elsewhere
	goneAfter    = time.Second      // without a packet here a flow is over whose end the other front end has seen
	// openFor is how long a move that the partner has told of stays open here. If the partner dies in its midst, the hosts' agents
	// come here, and the session is theirs to have as long as their keepers hold it, 30 s by default: were the move over before,
	// both would be told no, and close their copies.
	openFor = 45 * time.Second
)

// exchange tells the partner of flows, and hears of its own by attend. Each side sends over the connection that it has made.
func (a *Agent) exchange(ctx context.Context, wg *sync.WaitGroup) error {
	d := &dirty{keys: map[Key]bool{}, wake: make(chan struct{}, 1)}
	r, err := ringbuf.NewReader(a.f.maps.FrontLearned)
	if err != nil {
		return fmt.Errorf("hearing of new flows: %w", err)
	}
	mark := d.mark
	a.f.onChange.Store(&mark)
	if err := a.f.configure(false); err != nil {
		r.Close()
		return err
	}
	wg.Go(func() {
		stop := context.AfterFunc(ctx, func() { r.Close() })
		defer stop()
		hearNews(r, d)
	})
	wg.Go(func() { a.callPartner(ctx, d) })
	return nil
}

// dirty are flows that the partner has not been told of since they were changed.
type dirty struct {
	mu   sync.Mutex
	keys map[Key]bool
	wake chan struct{}
}

func (d *dirty) mark(k Key) {
	d.mu.Lock()
	d.keys[k] = true
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// take empties it.
func (d *dirty) take() map[Key]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.keys
	d.keys = map[Key]bool{}
	return out
}

// hearNews marks flows that the data path learns.
func hearNews(r *ringbuf.Reader, d *dirty) {
	for {
		rec, err := r.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		} else if err != nil {
			continue
		}
		var k frontFrontFlowKey
		if _, err := binary.Decode(rec.RawSample, binary.NativeEndian, &k); err == nil {
			d.mark(keyOf(k))
		}
	}
}

// callPartner connects to the partner, whenever it is there, and tells it of flows.
func (a *Agent) callPartner(ctx context.Context, d *dirty) {
	for ctx.Err() == nil {
		c, err := peer.Dial(ctx, a.o.Partner.Address, a.o.Partner.Name, a.o.TLS, a.own)
		if err == nil {
			a.o.Log.Info("the partner is connected", "name", a.o.Partner.Name)
			err = a.tellPartner(ctx, c, d)
			c.Close()
			a.o.Log.Warn("the partner is not connected any more: flows are not exchanged", "reason", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(partnerPause):
		}
	}
}

func (a *Agent) tellPartner(ctx context.Context, c *peer.Conn, d *dirty) error {
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := c.Receive(); err != nil { // pongs
				ended <- err
				return
			}
		}
	}()
	all, ping := time.NewTicker(tellAll), time.NewTicker(pingEvery)
	defer all.Stop()
	defer ping.Stop()
	markAll := func() error { return a.f.Flows(func(k Key, _ Flow) bool { d.mark(k); return true }) }
	if err := markAll(); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			return err
		case <-all.C:
			if err := markAll(); err != nil {
				return err
			}
		case <-ping.C:
			if a.silent(c) {
				return errors.New("it says nothing")
			}
			if err := c.Ping(); err != nil {
				return err
			}
		case <-d.wake:
			keys := d.take()
			if err := a.tellOf(c, keys); err != nil {
				for k := range keys { // the next connection's: of what has ended nothing else tells
					d.mark(k)
				}
				return err
			}
		}
	}
}

// A record of flows' exchange, in network byte order: 0 client, 16 port, 18 service, 20 owner, 22 to, 24 epoch, 28 for how many
// seconds nothing was seen, 30 flags: 1 it has ended, 31 zero. Before the records are four bytes: 1, the version, and zeros.
const (
	recordSize  = 32
	recordsMost = 16 << 10 // of a frame
	recordGone  = 1
)

type record struct {
	key  Key
	flow move.Flow // owner, to, epoch
	age  time.Duration
	gone bool
}

func (a *Agent) tellOf(c *peer.Conn, keys map[Key]bool) error {
	b := []byte{1, 0, 0, 0}
	for k := range keys {
		fl, err := a.f.Flow(k)
		r := record{key: k, flow: fl.Flow, gone: errors.Is(err, ErrNoFlow), age: time.Duration(kernel.Monotonic() - min(kernel.Monotonic(), fl.Seen))}
		if err != nil && !r.gone {
			return err
		}
		if err == nil && fl.never(k) {
			continue // the other one would not know that it is soon forgotten; once it is open the data path says so
		}
		b = r.append(b)
		if len(b) >= recordsMost*recordSize {
			if err := c.SendFlows(b); err != nil {
				return err
			}
			b = b[:4]
		}
	}
	if len(b) == 4 {
		return nil
	}
	return c.SendFlows(b)
}

func (r record) append(b []byte) []byte {
	client := r.key.Client.Addr().As16()
	b = append(b, client[:]...)
	b = binary.BigEndian.AppendUint16(b, r.key.Client.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(r.key.Service))
	b = binary.BigEndian.AppendUint16(b, uint16(r.flow.Owner))
	b = binary.BigEndian.AppendUint16(b, uint16(r.flow.To))
	b = binary.BigEndian.AppendUint32(b, uint32(r.flow.Epoch))
	b = binary.BigEndian.AppendUint16(b, uint16(min(r.age/time.Second, 1<<16-1)))
	flags := byte(0)
	if r.gone {
		flags = recordGone
	}
	return append(b, flags, 0)
}

func parseRecords(b []byte) (out []record, err error) {
	if len(b) < 4 || b[0] != 1 || (len(b)-4)%recordSize != 0 {
		return nil, fmt.Errorf("flows of %d bytes, in a form that this weir does not know: update the older front end", len(b))
	}
	for b = b[4:]; len(b) > 0; b = b[recordSize:] {
		r := record{age: time.Duration(binary.BigEndian.Uint16(b[28:])) * time.Second, gone: b[30]&recordGone != 0,
			key: Key{netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), binary.BigEndian.Uint16(b[16:])), int(binary.BigEndian.Uint16(b[18:]))},
			flow: move.Flow{Owner: move.Host(binary.BigEndian.Uint16(b[20:])), To: move.Host(binary.BigEndian.Uint16(b[22:])),
				Epoch: move.Epoch(binary.BigEndian.Uint32(b[24:]))}}
		if r.flow.Owner > MostHosts || r.flow.To > MostHosts || !r.gone && r.flow.Owner == 0 {
			return nil, fmt.Errorf("a flow of host %d: there is no such", r.flow.Owner)
		}
		out = append(out, r)
	}
	return out, nil
}

// hearPartner takes what the partner tells of flows, as long as it is connected.
func (a *Agent) hearPartner(c *peer.Conn) {
	c.Handle(peer.Control{Flows: func(b []byte) {
		records, err := parseRecords(b)
		for _, r := range records {
			err = errors.Join(err, a.adopt(r))
		}
		if err != nil {
			a.o.Log.Warn("flows of the partner", "reason", err)
		}
	}})
	for {
		if _, err := c.Receive(); err != nil {
			return
		}
	}
}

// adopt takes what the partner knows of a flow, where it is later: the epoch says so. Two that have learned a flow at once, at
// different hosts, keep to the one whose name comes first.
func (a *Agent) adopt(r record) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	seen := kernel.Monotonic() - min(kernel.Monotonic(), uint64(r.age))
	fl, err := a.f.Flow(r.key)
	switch {
	case errors.Is(err, ErrNoFlow) && r.gone:
		return nil
	case errors.Is(err, ErrNoFlow):
		if err := a.f.learn(r.key, r.flow, seen, told); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
		a.watchMove(r)
		return nil
	case err != nil:
		return err
	case fl.Parked || fl.Held: // it is being moved here
		return nil
	case r.gone:
		if fl.Ended {
			return a.over(r.key, fl.Seen)
		}
		// It may be a new one between the same ends: then more is seen of it.
		a.after(goneAfter, func() {
			if err := a.over(r.key, fl.Seen); err != nil {
				a.o.Log.Warn("a flow that the partner has seen end stays known", "reason", err)
			}
		})
		return nil
	}
	_, err = a.f.change(r.key, 0, seen, func(now *Flow) {
		switch {
		case r.flow.Epoch > now.Epoch, r.flow.Epoch == now.Epoch && r.flow.Owner != now.Owner && a.o.Partner.Name < a.o.Name:
			now.Flow, now.Life = r.flow, 0
		case r.flow.Epoch == now.Epoch && r.flow.Owner == now.Owner && r.flow.To != 0:
			now.To = r.flow.To // from here on no reset of its host passes
		}
	})
	if errors.Is(err, ErrNoFlow) {
		return nil // it has ended meanwhile
	}
	a.watchMove(r)
	return err
}

// over forgets a flow whose end the partner has seen, if nothing has been seen of it here since. The caller holds mu.
func (a *Agent) over(k Key, seen uint64) error {
	fl, err := a.f.Flow(k)
	if errors.Is(err, ErrNoFlow) || err == nil && (fl.Seen != seen || fl.To != 0 || fl.Parked || fl.Pinned) {
		return nil
	} else if err != nil {
		return err
	}
	if err := a.f.maps.FrontFlows.Delete(k.raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forgetting the flow of %s: %w", k.Client, err)
	}
	return nil
}

// watchMove ends a move that the partner has told of and says nothing more about, see openFor. The epoch stays: it is the partner's.
func (a *Agent) watchMove(r record) {
	if r.flow.To == 0 {
		return
	}
	if t := a.timers[r.key]; t != nil {
		t.Stop()
	}
	a.timers[r.key] = a.after(a.openFor, func() {
		delete(a.timers, r.key)
		_, err := a.f.change(r.key, 0, 0, func(fl *Flow) {
			if fl.Epoch == r.flow.Epoch && !fl.Held {
				fl.To = 0
			}
		})
		if err != nil && !errors.Is(err, ErrNoFlow) {
			a.o.Log.Warn("a move of the partner's stays open", "flow", r.key.Client, "reason", err)
		}
	})
}
