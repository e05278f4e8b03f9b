// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Key is a flow of a service, as the client's packets have it.
type Key struct {
	Client  netip.AddrPort // the port is 0 where the service is by source
	Service int
}

// Flow is what the front end knows of one.
type Flow struct {
	move.Flow
	Parked  bool // packets to the owner go to the device of held packets
	Seen    uint64
	In, Out uint64 // packets
	Ended   bool   // a reset, or the ends of both sides, have been seen
}

// ErrNoFlow says that the front end knows of no such flow.
var ErrNoFlow = errors.New("no such flow")

// The word of a flow, see front.h.
const (
	hostBits    = 10
	hostMask    = 1<<hostBits - 1
	toAt        = hostBits
	beforeAt    = 2 * hostBits
	heldBit     = 1 << 30
	parkedBit   = 1 << 31
	epochAt     = 32
	finIn       = 1
	finOut      = 2
	wasReset    = 4
	maxServices = 64
)

func word(f move.Flow, parked bool) uint64 {
	w := uint64(f.Owner) | uint64(f.To)<<toAt | uint64(f.Before)<<beforeAt | uint64(f.Epoch)<<epochAt
	if f.Held {
		w |= heldBit
	}
	if parked {
		w |= parkedBit
	}
	return w
}

func unword(w uint64) (f move.Flow, parked bool) {
	return move.Flow{Owner: move.Host(w & hostMask), To: move.Host(w >> toAt & hostMask), Before: move.Host(w >> beforeAt & hostMask),
		Held: w&heldBit != 0, Epoch: move.Epoch(w >> epochAt)}, w&parkedBit != 0
}

func (k Key) raw() frontFrontFlowKey {
	return frontFrontFlowKey{Client: k.Client.Addr().As16(), Port: swap(k.Client.Port()), Service: uint16(k.Service)}
}

func keyOf(r frontFrontFlowKey) Key {
	return Key{netip.AddrPortFrom(netip.AddrFrom16(r.Client).Unmap(), swap(r.Port)), int(r.Service)}
}

// swap turns a port into network byte order, or back.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// Flow reads a flow. The error is ErrNoFlow where there is none.
func (f *Front) Flow(k Key) (Flow, error) {
	var v frontFrontFlow
	if err := f.maps.FrontFlows.Lookup(k.raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
		return Flow{}, fmt.Errorf("%w: %s of service %d", ErrNoFlow, k.Client, k.Service)
	} else if err != nil {
		return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
	}
	return flowOf(v), nil
}

func flowOf(v frontFrontFlow) Flow {
	out := Flow{Seen: v.Seen, In: v.In, Out: v.Out, Ended: v.Flags&wasReset != 0 || v.Flags&(finIn|finOut) == finIn|finOut}
	out.Flow, out.Parked = unword(v.Word)
	return out
}

// Change changes a flow in one step: change gets what it is, and says who owns it and whether it is parked; the rest of it is
// the data path's. It is asked again where the data path has changed the flow meanwhile. Returned is what the flow was made.
func (f *Front) Change(k Key, change func(*Flow)) (Flow, error) {
	for {
		var v frontFrontFlow
		if err := f.maps.FrontFlows.Lookup(k.raw(), &v); errors.Is(err, ebpf.ErrKeyNotExist) {
			return Flow{}, fmt.Errorf("%w: %s of service %d", ErrNoFlow, k.Client, k.Service)
		} else if err != nil {
			return Flow{}, fmt.Errorf("reading the flow of %s: %w", k.Client, err)
		}
		fl := flowOf(v)
		change(&fl)
		switch done, err := f.exchange(k, v.Word, word(fl.Flow, fl.Parked)); {
		case err != nil:
			return fl, err
		case done:
			return fl, nil
		}
	}
}

// What front_change returns.
const (
	changed = iota
	isOther
	isNone
)

func (f *Front) exchange(k Key, have, want uint64) (bool, error) {
	args, err := binary.Append(nil, binary.NativeEndian, frontFrontChangeArgs{Key: k.raw(), Have: have, Want: want})
	if err != nil {
		return false, err
	}
	switch ret, _, err := f.maps.FrontChange.Test(args); {
	case err != nil:
		return false, fmt.Errorf("changing the flow of %s: %w", k.Client, err)
	case ret == changed:
		return true, nil
	case ret == isOther:
		return false, nil
	}
	return false, fmt.Errorf("%w: %s of service %d has ended meanwhile", ErrNoFlow, k.Client, k.Service)
}

// Learn records a flow of a host that the data path has not seen yet: an override, or one of another front end.
func (f *Front) Learn(k Key, owner move.Host, epoch move.Epoch) error {
	v := frontFrontFlow{Word: word(move.Flow{Owner: owner, Epoch: epoch}, false), Seen: now()}
	if err := f.maps.FrontFlows.Update(k.raw(), v, ebpf.UpdateNoExist); err != nil {
		return fmt.Errorf("learning the flow of %s: %w", k.Client, err)
	}
	return nil
}

// Forget removes flows that have ended, and those of which nothing has been seen for as long as idle; not those that move.
// It returns how many.
func (f *Front) Forget(ended, idle time.Duration) (int, error) {
	var gone []frontFrontFlowKey
	var k frontFrontFlowKey
	var v frontFrontFlow
	at := now()
	it := f.maps.FrontFlows.Iterate()
	for it.Next(&k, &v) {
		fl := flowOf(v)
		age := time.Duration(at - min(at, fl.Seen))
		if fl.To == 0 && !fl.Parked && (fl.Ended && age >= ended || age >= idle) {
			gone = append(gone, k)
		}
	}
	err := it.Err()
	for _, k := range gone {
		err = errors.Join(err, f.maps.FrontFlows.Delete(k))
	}
	return len(gone), err
}

// Flows calls yield with each flow until it returns false.
func (f *Front) Flows(yield func(Key, Flow) bool) error {
	var k frontFrontFlowKey
	var v frontFrontFlow
	it := f.maps.FrontFlows.Iterate()
	for it.Next(&k, &v) {
		if !yield(keyOf(k), flowOf(v)) {
			return nil
		}
	}
	return it.Err()
}
