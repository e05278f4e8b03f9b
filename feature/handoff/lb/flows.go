// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// Key is a flow of a service, as the client's packets have it.
type Key struct {
	Client  netip.AddrPort // the port is 0 where the service is by source
	Service int            // its number, and above that the tag of the address: see Service.Tag
}

// Flow is what the load balancer knows of one.
type Flow struct {
	move.Flow
	Buffered    bool // packets to the owner go to the device of buffered packets
	Seen        uint64
	In, Out     uint64       // packets
	Ended       bool         // a reset, or the ends of both sides, have been seen
	BothEnds    bool         // the latter
	Reset       bool         // by its owner, and the client has said nothing since
	ClientReset bool         // by its client's reset alone: anybody can make one up
	Opening     bool         // a SYN made it known, or its owner has reset it, and no ACK of the client has come after a backend's answer
	Unanswered  bool         // nothing but SYNs of the client and resets of its owner have come since it was opened
	Balanced    bool         // by the data path, which has chosen the epoch
	Told        bool         // by Learn or Override, and nothing of it was seen then
	Reported    bool         // a backend has made it known by its word
	Named       bool         // its owner's agent has told of the session, since the owner's latest answer to a SYN
	Reporter    move.Backend // that backend; 0: it is not known
	Pinned      bool         // by Override: it stays until Release
	Until       uint64       // CLOCK_MONOTONIC in ns: packets to the owner wait no longer than that
	Incarnation uint64       // instance of the owner's agent that had it flipped to the owner; 0: none has
}

// errNoFlow says that the load balancer knows of no such flow.
var errNoFlow = errors.New("no such flow")

// The word of a flow, see lb.h.
const (
	backendBits  = 10
	backendMask  = 1<<backendBits - 1
	toAt         = backendBits
	beforeAt     = 2 * backendBits
	bufferingBit = 1 << 30
	bufferedBit  = 1 << 31
	epochAt      = 32
	finIn        = 1
	finOut       = 2
	wasReset     = 4
	told         = 8
	pinned       = 16
	opening      = 32
	reported     = 64
	noAnswer     = 128
	resetOut     = 256
	balanced     = 512
	ownerReset   = 1024
	named        = 2048
	reporterAt   = 16 // of flags: the backend
)

func word(f move.Flow, parked bool) uint64 {
	w := uint64(f.Owner) | uint64(f.To)<<toAt | uint64(f.Predecessor)<<beforeAt | uint64(f.Epoch)<<epochAt
	if f.Buffering {
		w |= bufferingBit
	}
	if parked {
		w |= bufferedBit
	}
	return w
}

func unword(w uint64) (f move.Flow, parked bool) {
	return move.Flow{Owner: move.Backend(w & backendMask), To: move.Backend(w >> toAt & backendMask), Predecessor: move.Backend(w >> beforeAt & backendMask),
		Buffering: w&bufferingBit != 0, Epoch: move.Epoch(w >> epochAt)}, w&bufferedBit != 0
}

// raw points to the data path's form: package ebpf takes what a pointer leads to as it is, and reflects on a value.
func (k Key) raw() *bpf.LBLbFlowKey {
	return &bpf.LBLbFlowKey{Client: k.Client.Addr().As16(), Port: swap(k.Client.Port()), Service: uint16(k.Service)}
}

func newKey(r bpf.LBLbFlowKey) Key {
	return Key{netip.AddrPortFrom(netip.AddrFrom16(r.Client).Unmap(), swap(r.Port)), int(r.Service)}
}

// swap turns a port into network byte order, or back.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// Flow reads a flow. The error is errNoFlow where there is none.
func (f *DataPath) Flow(k Key) (Flow, error) {
	var v bpf.LBLbFlow
	if err := f.maps.LbFlows.Lookup(k.raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
		return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
	} else if err != nil {
		return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
	}
	return newFlow(v), nil
}

func newFlow(v bpf.LBLbFlow) Flow {
	out := Flow{Seen: v.Seen, In: v.In, Out: v.Out, BothEnds: v.Flags&(finIn|finOut) == finIn|finOut, Reset: v.Flags&resetOut != 0,
		Opening: v.Flags&opening != 0, Unanswered: v.Flags&noAnswer != 0, Balanced: v.Flags&balanced != 0, Told: v.Flags&told != 0, Reported: v.Flags&reported != 0, Named: v.Flags&named != 0, Pinned: v.Flags&pinned != 0, Until: v.Until, Incarnation: v.Life}
	out.Ended, out.ClientReset = out.BothEnds || v.Flags&wasReset != 0, v.Flags&(wasReset|ownerReset|finOut) == wasReset
	out.Flow, out.Buffered = unword(v.Word)
	out.Nonce, out.Reporter = move.Nonce(v.Birth), move.Backend(v.Flags>>reporterAt&backendMask)
	return out
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
		if err := f.maps.LbFlows.Lookup(k.raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			return Flow{}, fmt.Errorf("%w: %s of service %d", errNoFlow, k.Client, k.Service)
		} else if err != nil {
			return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
		}
		fl := newFlow(v)
		change(&fl)
		switch done, err := f.exchange(bpf.LBLbChangeArgs{Key: *k.raw(), Have: v.Word, Want: word(fl.Flow, fl.Buffered), Until: until, Life: fl.Incarnation, Seen: seen, Named: uint32(oneIf(fl.Named))}, k); {
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
	err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), told)
	f.changed(k)
	return err
}

func (f *DataPath) learn(k Key, fl move.Flow, seen uint64, flags uint32) error {
	v := bpf.LBLbFlow{Word: word(fl, false), Seen: seen, Flags: flags, Birth: rand.Uint32() | 1}
	if err := f.maps.LbFlows.Update(k.raw(), &v, ebpf.UpdateNoExist); errors.Is(err, unix.E2BIG) {
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
			if err := f.maps.LbFlows.Delete(k.raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("overriding the flow of %s: %w", k.Client, err)
			}
		}
		if err := f.learn(k, move.Flow{Owner: owner, Epoch: epoch}, kernel.Monotonic(), told|pinned); !errors.Is(err, ebpf.ErrKeyExist) {
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
	if err := f.maps.LbFlows.Delete(k.raw()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("releasing the flow of %s: %w", k.Client, err)
	}
	return nil
}

// unanswered is how long a flow stays known that no backend has answered, or whose client has not answered the backend: a flood of SYNs must
// not fill the table. A backend repeats its answer for half a minute, within which no pause is as long.
const unanswered = 20 * time.Second

// never says that a flow is, as far as anybody can tell, no more than what a client has made up: no backend has answered it, or its
// client has not answered the backend. One that has moved was some backend's: then it is neither opening nor balanced.
func (fl *Flow) never(k Key) bool {
	return fl.To == 0 && (fl.Opening || (fl.Epoch == 0 || fl.Balanced) && fl.Out == 0 && k.Client.Port() != 0 && !fl.Told)
}

// doubtful says whether a flow stays though its client has reset it. The reset may be made up, and the hash leads to another backend, which
// would reset a session that lives. Its owner's agent tells of all sessions within a quarter of idle. A flow that it does not name, or that was never
// opened, does not stay, and no flow does where too many would.
func (f *DataPath) doubtful(k Key, fl Flow, age, idle time.Duration, c *census) bool {
	return fl.ClientReset && !c.crowded && age < idle/4+c.slack && !fl.never(k) && (f.elsewhere(k, fl.Owner) || c.pair != nil && c.pair.elsewhereThere(k, fl.Owner))
}

// Forget removes flows that have ended, and those of which nothing has been seen for as long as idle; not those that move, and
// not what Override has made. A connection that was never opened goes after 20 s.
// Doubtful flows stay until their owners' agents should have told of them, in an eighth of the room. It returns how many. Where flows have taken three
// quarters of their room, sources of datagrams are not learned any more, which anybody could make up: these go by the hash.
func (f *DataPath) Forget(ended, idle time.Duration) (int, error) {
	return f.forget(ended, idle, &sync.Mutex{}, newCensus())
}

// forget does, holding mu whenever it removes a flow: a move that begins meanwhile is seen then. It counts flows in c.
func (f *DataPath) forget(ended, idle time.Duration, mu sync.Locker, c *census) (n int, err error) {
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
		return fl.never(k) && age >= min(idle, unanswered) || fl.unseen() && away(fl.Owner)
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
	f.crowded.Store(doubtful > int(f.maps.LbFlows.MaxEntries())/8)
	remove := func(k Key) error {
		mu.Lock()
		defer mu.Unlock()
		fl, err := f.Flow(k)
		if err != nil || !over(k, fl, kernel.Monotonic(), c.away) { // it moves by now, or goes on
			return err
		}
		if err := f.maps.LbFlows.Delete(k.raw()); err != nil {
			return err
		}
		n++
		if fl.Ended || fl.unseen() {
			f.changed(k)
		}
		return nil
	}
	for _, k := range gone {
		if e := remove(k); !errors.Is(e, errNoFlow) && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, e)
		}
	}
	full := known-n > int(f.maps.LbFlows.MaxEntries())*3/4
	f.full.Store(full)
	return n, errors.Join(err, f.configure(full))
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
	return f.each(func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool { return yield(newKey(k), newFlow(v)) })
}
