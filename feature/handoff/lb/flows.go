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

// The record of a flow.
type (
	Key  = flow.Key
	Flow = flow.Flow
)

// errNoFlow says that the load balancer knows of no such flow.
var errNoFlow = errors.New("no such flow")

// Flow reads a flow. The error is errNoFlow where there is none.
func (f *DataPath) Flow(k Key) (Flow, error) {
	var v bpf.LBLbFlow
	if err := f.maps.LbFlows.Lookup(k.Raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
		return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
	} else if err != nil {
		return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
	}
	return flow.Parse(v), nil
}

// Change changes a flow in one step: change gets what it is, and says who owns it, since which life of its agent, and whether it is
// parked; the rest of it is the data path's. It is asked again where the data path has changed the flow meanwhile. Returned is what the flow was made.
func (f *DataPath) Change(k Key, change func(*Flow)) (Flow, error) {
	fl, err := f.change(k, 0, 0, change)
	f.changed(k)
	return fl, err
}

// changed tells whoever wants to know that a flow has been changed, made or ended.
func (f *DataPath) changed(k Key) {
	if tell := f.onChange.Load(); tell != nil {
		(*tell)(k)
	}
}

// change also sets until when the flow is parked, if that is not 0, and when it was seen, if that is later than what is known.
func (f *DataPath) change(k Key, until, seen uint64, change func(*Flow)) (Flow, error) {
	for {
		var v bpf.LBLbFlow
		if err := f.maps.LbFlows.Lookup(k.Raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
		} else if err != nil {
			return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
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

// What lb_change returns.
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
		return false, fmt.Errorf("changing the flow of %s: %w", k.Client, err)
	case ret == changed:
		return true, nil
	case ret == isOther:
		return false, nil
	}
	return false, fmt.Errorf("%w: %s of service %d has ended meanwhile", errNoFlow, k.Client, k.Service)
}

// Learn records a flow of a backend that the data path has not seen yet, one of another load balancer. It is an error if the flow is
// known.
func (f *DataPath) Learn(k Key, owner move.Backend, epoch move.Epoch) error {
	err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), flow.Told)
	f.changed(k)
	return err
}

func (f *DataPath) learn(k Key, fl move.Flow, seen uint64, flags uint32) error {
	v := bpf.LBLbFlow{Word: flow.Word(fl, false), Seen: seen, Flags: flags, Birth: rand.Uint32() | 1}
	if err := f.maps.LbFlows.Update(k.Raw(), &v, ebpf.UpdateNoExist); errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("learning the flow of %s: the table is full, with %d flows: it goes by the hash, and cannot move", k.Client, f.maps.LbFlows.MaxEntries())
	} else if err != nil {
		return fmt.Errorf("learning the flow of %s: %w", k.Client, err)
	}
	return nil
}

// errLive says that a flow is a connection, or is being moved: only its backend can give it up.
var errLive = errors.New("the flow is live")

// override has a flow be a backend's, whatever the hash says, until Release: also one of which nothing has been seen. A source of a
// service by source changes its backend at once, and its connections are reset there; a connection that is known by itself is not
// torn from its backend: move it (the error is ErrLive).
func (f *DataPath) override(k Key, owner move.Backend) error {
	for range 100 { // the data path may learn it anew in between
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
				return fmt.Errorf("overriding the flow of %s: %w", k.Client, err)
			}
		}
		if err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), flow.Told|flow.Pinned); !errors.Is(err, ebpf.ErrKeyExist) {
			f.changed(k)
			return err
		}
	}
	return fmt.Errorf("overriding the flow of %s: the data path learns it faster than it is forgotten: try again", k.Client)
}

// Release ends an override: the flow goes by the hash again, at its next packet.
func (f *DataPath) Release(k Key) error {
	fl, err := f.Flow(k)
	if err != nil {
		return err
	}
	if !fl.Pinned {
		return fmt.Errorf("%s of service %d is not overridden", k.Client, k.Service)
	}
	if err := f.maps.LbFlows.Delete(k.Raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("releasing the flow of %s: %w", k.Client, err)
	}
	return nil
}

// unanswered is how long a flow stays known that no backend has answered, or whose client has not answered the backend: a flood of SYNs must
// not fill the table. A backend repeats its answer for half a minute, within which no pause is as long.
const unanswered = 20 * time.Second

// doubtful says whether a flow stays though its client has reset it. The reset may be made up, and the hash leads to another backend, which
// would reset a session that lives. Its owner's agent tells of all sessions within a quarter of idle. A flow that it does not name, or that was never
// opened, does not stay, and no flow does where too many would.
func (f *DataPath) doubtful(k Key, fl Flow, age, idle time.Duration, c *census) bool {
	return fl.ClientReset && !c.crowded && age < idle/4+c.slack && !fl.Never(k) && (f.elsewhere(k, fl.Owner) || c.pair != nil && c.pair.elsewhereThere(k, fl.Owner))
}

// Forget removes flows that have ended, and those of which nothing has been seen for as long as idle; not those that move, and
// not what Override has made. A connection that was never opened goes after 20 s.
// So do flows that backends' packets alone have made known, where these have an eighth of the room.
// Doubtful flows stay until their owners' agents should have told of them, in an eighth of the room. It returns how many. Where flows have taken three
// quarters of their room, no source becomes known any more, for anybody can make up sources: these go by the hash.
func (f *DataPath) Forget(ended, idle time.Duration) (int, error) {
	return f.forget(ended, idle, &sync.Mutex{}, newCensus())
}

// forget does, holding mu whenever it removes a flow: a move that begins meanwhile is seen then. It counts flows in c.
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
		if err != nil || !over(k, fl, kernel.Monotonic(), c.away) { // it moves by now, or goes on
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

// beginRoom counts the table where no agent has made room for sources yet.
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

// countUnasked tells the data path how many flows backends' packets alone have made known.
func (f *DataPath) countUnasked(n int) error {
	f.unasked.Store(n > int(f.maps.LbFlows.MaxEntries())/8)
	return f.maps.LbRoom.Put(uint32(0), bpf.LBLbUnasked{Flows: int64(n), Counted: kernel.Monotonic()})
}

// flowBatch is how many flows one call reads.
const flowBatch = 2048

// each calls yield with each flow until it returns false. A flow that ends meanwhile may be left out, and no other.
func (f *DataPath) each(yield func(bpf.LBLbFlowKey, bpf.LBLbFlow) bool) error {
	keys, values := make([]bpf.LBLbFlowKey, flowBatch), make([]bpf.LBLbFlow, flowBatch)
	var at ebpf.MapBatchCursor
	for {
		n, err := f.maps.LbFlows.BatchLookup(&at, keys, values, nil)
		switch last := errors.Is(err, ebpf.ErrKeyNotExist); {
		case errors.Is(err, ebpf.ErrNotSupported): // by the first call, then
			return f.eachAlone(yield)
		case err != nil && !last:
			return fmt.Errorf("reading flows: %w", err)
		default:
			for i := range n {
				if !yield(keys[i], values[i]) {
					return nil
				}
			}
			if last {
				return nil
			}
		}
	}
}

// eachAlone does so where the kernel reads no batches.
func (f *DataPath) eachAlone(yield func(bpf.LBLbFlowKey, bpf.LBLbFlow) bool) error {
	var k bpf.LBLbFlowKey
	var v bpf.LBLbFlow
	it := f.maps.LbFlows.Iterate()
	for it.Next(&k, &v) {
		if !yield(k, v) {
			return nil
		}
	}
	return it.Err()
}

// Flows calls yield with each flow until it returns false.
func (f *DataPath) Flows(yield func(Key, Flow) bool) error {
	return f.each(func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool { return yield(flow.ParseKey(k), flow.Parse(v)) })
}
