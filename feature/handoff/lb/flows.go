// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/sources"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// Types of package flow.
type (
	Key  = flow.Key
	Flow = flow.Flow
)

// errNoFlow reports an unknown flow.
var errNoFlow = errors.New("no such flow")

// Flow reads a flow. The error wraps errNoFlow for an unknown one.
func (f *DataPath) Flow(k Key) (Flow, error) {
	var v bpf.LBLbFlow
	if err := f.maps.LbFlows.Lookup(k.Raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
		return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
	} else if err != nil {
		return Flow{}, fmt.Errorf("read the flow of %s: %w", k.Client, err)
	}
	return flow.Parse(v), nil
}

// Change changes a flow atomically. change sets the owner, the incarnation of the owner's agent, and whether packets are
// buffered. The rest belongs to the data path. change is called again if the data path changed the flow meanwhile. Change returns
// the new flow.
func (f *DataPath) Change(k Key, change func(*Flow)) (Flow, error) {
	fl, err := f.change(k, 0, 0, change)
	f.changed(k)
	return fl, err
}

// changed reports a changed, learned or ended flow to the partner's exchange, if there is one.
func (f *DataPath) changed(k Key) {
	if tell := f.onChange.Load(); tell != nil {
		(*tell)(k)
	}
}

// change is Change with two more values. It sets the deadline of the buffering if until is not 0, and raises the time of the
// latest packet to seen.
func (f *DataPath) change(k Key, until, seen uint64, change func(*Flow)) (Flow, error) {
	for {
		var v bpf.LBLbFlow
		if err := f.maps.LbFlows.Lookup(k.Raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
		} else if err != nil {
			return Flow{}, fmt.Errorf("read the flow of %s: %w", k.Client, err)
		}
		fl := flow.Parse(v)
		change(&fl)
		switch done, err := f.exchange(bpf.LBLbChangeArgs{Key: *k.Raw(), Have: v.Word, Want: flow.Word(fl.Flow, fl.Buffered), Until: until, Life: fl.Incarnation, Seen: seen, Named: uint32(oneIf(fl.Named))}, k); {
		case err != nil:
			return fl, err
		case done:
			return fl, nil
		}
	}
}

// These are the results of lb_change.
const (
	changed = iota
	isOther
	isNone
)

func (f *DataPath) exchange(a bpf.LBLbChangeArgs, k Key) (bool, error) {
	args, err := binary.Append(nil, binary.NativeEndian, a)
	if err != nil {
		return false, err
	}
	switch ret, _, err := f.maps.LbChange.Test(args); {
	case err != nil:
		return false, fmt.Errorf("change the flow of %s: %w", k.Client, err)
	case ret == changed:
		return true, nil
	case ret == isOther:
		return false, nil
	}
	return false, fmt.Errorf("%w: %s of service %d has ended meanwhile", errNoFlow, k.Client, k.Service)
}

// Learn records a flow that the data path has not seen yet, such as one of another load balancer. It fails if the flow is known.
func (f *DataPath) Learn(k Key, owner move.Backend, epoch move.Epoch) error {
	err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), flow.Told)
	f.changed(k)
	return err
}

func (f *DataPath) learn(k Key, fl move.Flow, seen uint64, flags uint32) error {
	v := bpf.LBLbFlow{Word: flow.Word(fl, false), Seen: seen, Flags: flags, Birth: rand.Uint32() | 1}
	if err := f.maps.LbFlows.Update(k.Raw(), &v, ebpf.UpdateNoExist); errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("learn the flow of %s: the table is full with %d flows: the flow follows the hash and cannot move", k.Client, f.maps.LbFlows.MaxEntries())
	} else if err != nil {
		return fmt.Errorf("learn the flow of %s: %w", k.Client, err)
	}
	return nil
}

// errLive reports an open connection or a moving flow. Only its backend can give it up.
var errLive = errors.New("the flow is live")

// override pins a flow to a backend until Release, regardless of the hash. The flow may be unknown. A source of a service by
// source changes its backend at once. Its connections are reset there. An open connection of a service by flow stays at its
// backend: move it instead. The error then wraps errLive.
func (f *DataPath) override(k Key, owner move.Backend) error {
	for range 100 { // the data path may learn the flow again in between
		epoch := move.Epoch(0)
		fl, err := f.Flow(k)
		switch {
		case errors.Is(err, errNoFlow):
		case err != nil:
			return err
		case fl.To != 0 || fl.Buffered || k.Client.Port() != 0 && !fl.Pinned && !fl.Ended && fl.Out > 0:
			return fmt.Errorf("%w: %s of service %d, at backend %d", errLive, k.Client, k.Service, fl.Owner)
		default:
			epoch = fl.Epoch + 1
			if err := f.maps.LbFlows.Delete(k.Raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("override the flow of %s: %w", k.Client, err)
			}
		}
		if err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), flow.Told|flow.Pinned); !errors.Is(err, ebpf.ErrKeyExist) {
			f.changed(k)
			return err
		}
	}
	return fmt.Errorf("override the flow of %s: the data path learns it again faster than it is removed: try again", k.Client)
}

// Release ends an override. The flow follows the hash at its next packet.
func (f *DataPath) Release(k Key) error {
	fl, err := f.Flow(k)
	if err != nil {
		return err
	}
	if !fl.Pinned {
		return fmt.Errorf("%s of service %d is not overridden", k.Client, k.Service)
	}
	if err := f.maps.LbFlows.Delete(k.Raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("release the flow of %s: %w", k.Client, err)
	}
	return nil
}

// unanswered is how long a flow stays known without an answer of a backend, or without the client's answer to the backend. It
// keeps a SYN flood from filling the table. A backend repeats its answer for half a minute, with pauses shorter than this.
const unanswered = 20 * time.Second

// doubtful reports whether a flow reset by its client stays known. The reset may be forged. If the hash leads to another backend,
// that backend would reset a live session. The owner's agent reports all of its sessions within a quarter of idle. A flow is not
// kept if the agent does not name it, or if it was never opened. No flow is kept if there are too many.
func (f *DataPath) doubtful(k Key, fl Flow, age, idle time.Duration, c *census) bool {
	return fl.ClientReset && !c.crowded && age < idle/4+c.slack && !fl.Never(k) && (f.elsewhere(k, fl.Owner) || c.pair != nil && c.pair.elsewhereThere(k, fl.Owner))
}

// Forget removes ended flows, and flows without a packet for idle. It keeps moving and overridden flows. It returns the number of
// removed flows. Further limits:
//
//   - A connection that was never opened is removed after 20 s.
//   - Flows known by backends' packets alone are removed after 20 s while they exceed an eighth of the table.
//   - Doubtful flows stay until their owners' agents should have reported them, up to an eighth of the table.
//   - At three quarters of the table no further source is learned, because anybody can forge sources. These follow the hash.
func (f *DataPath) Forget(ended, idle time.Duration) (int, error) {
	return f.forget(ended, idle, &sync.Mutex{}, newCensus())
}

// forget is Forget with a lock and a census. It holds mu while it removes a flow, so it detects a move that has begun meanwhile.
// It counts flows in c.
func (f *DataPath) forget(ended, idle time.Duration, mu sync.Locker, c *census) (n int, err error) {
	learned, err := sources.Learned(f.maps.LbSources)
	if err != nil {
		return 0, err
	}
	c.crowded = f.crowded.Load()
	doubtful := 0
	over := func(k Key, fl Flow, now uint64, away func(move.Backend) bool) bool {
		age := time.Duration(now - min(now, fl.Seen))
		switch {
		case fl.To != 0 || fl.Buffered || fl.Pinned:
			return false
		case age >= idle:
			return true
		case fl.Ended && age >= ended && f.doubtful(k, fl, age, idle, c):
			doubtful++
			return false
		case fl.Ended && age >= ended:
			return true
		}
		return (fl.Never(k) || fl.Unasked && f.unasked.Load()) && age >= min(idle, unanswered) || fl.Unseen() && away(fl.Owner)
	}
	var gone []Key
	known, now := 0, kernel.Monotonic() // reading the clock is a system call
	err = f.Flows(func(k Key, fl Flow) bool {
		known++
		c.count(fl)
		if over(k, fl, now, func(b move.Backend) bool { return c.gone[b] }) {
			gone = append(gone, k)
		}
		return true
	})
	counted := err == nil
	f.crowded.Store(doubtful > int(f.maps.LbFlows.MaxEntries())/8)
	err = errors.Join(err, f.countUnasked(c.unaskedFlows()))
	remove := func(k Key) error {
		mu.Lock()
		defer mu.Unlock()
		fl, err := f.Flow(k)
		if err != nil || !over(k, fl, kernel.Monotonic(), c.away) { // it moves by now, or has new packets
			return err
		}
		if err := f.maps.LbFlows.Delete(k.Raw()); err != nil {
			return err
		}
		n++
		if fl.Ended || fl.Unseen() || fl.Unasked {
			f.changed(k)
		}
		return nil
	}
	for _, k := range gone {
		if e := remove(k); !errors.Is(e, errNoFlow) && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, e)
		}
	}
	if counted {
		err = errors.Join(err, f.makeRoom(learned, known-n))
	}
	return n, err
}

// beginRoom counts the table if no agent has set the room for sources yet.
func (f *DataPath) beginRoom() error {
	made, err := sources.Made(f.maps.LbSources)
	if made || err != nil {
		return err
	}
	learned, err := sources.Learned(f.maps.LbSources)
	if err != nil {
		return err
	}
	known := 0
	if err := f.Flows(func(Key, Flow) bool { known++; return true }); err != nil {
		return err
	}
	return f.makeRoom(learned, known)
}

func (f *DataPath) makeRoom(learned uint64, known int) error {
	full, err := sources.Make(f.maps.LbSources, learned, known, int(f.maps.LbFlows.MaxEntries()))
	if err != nil {
		return err
	}
	f.full.Store(full)
	return f.configure()
}

// countUnasked writes the number of unconfirmed flows, known by backends' packets alone, to the data path.
func (f *DataPath) countUnasked(n int) error {
	f.unasked.Store(n > int(f.maps.LbFlows.MaxEntries())/8)
	return f.maps.LbRoom.Put(uint32(0), bpf.LBLbUnasked{Flows: int64(n), Counted: kernel.Monotonic()})
}

// dropFlows forgets the flows of a backend.
func (f *DataPath) dropFlows(owner move.Backend) error {
	var gone []Key
	err := f.Flows(func(k Key, fl Flow) bool {
		if fl.Owner == owner {
			gone = append(gone, k)
		}
		return true
	})
	for _, k := range gone {
		if e := f.maps.LbFlows.Delete(k.Raw()); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("forget the flow of %s: %w", k.Client, e))
		}
	}
	return err
}

// Flows calls yield with each flow until it returns false.
func (f *DataPath) Flows(yield func(Key, Flow) bool) error {
	return flow.Each(f.maps.LbFlows, func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool { return yield(flow.ParseKey(k), flow.Parse(v)) })
}
