// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/ring"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// These are LB_ANSWER_TIME and LB_RECLAIM_TIME of lb.h.
const (
	answerTime  = 600 * time.Millisecond
	reclaimTime = 45 * time.Second
)

// leaves reports whether a datagram or a SYN of a known flow follows the table instead, as balance
// in lb.bpf.c decides. why is the reason, or the condition under which a later SYN does.
func (x *Explainer) leaves(fl flow.Flow, client netip.AddrPort, s bpf.LBLbService) (leaves bool, why string, err error) {
	now := kernel.Monotonic()
	setup, err := x.setup()
	if err != nil {
		return false, "", err
	}
	if fl.Pinned || fl.To != 0 || fl.Buffering || fl.Buffered || fl.Predecessor != 0 && now < fl.Until+uint64(reclaimTime)+uint64(setup.Reclaim)*uint64(time.Second) {
		return false, "", nil
	}
	var b bpf.LBLbBackend
	if err := x.Maps.LbBackends.Lookup(uint32(fl.Owner), &b); err != nil {
		return false, "", fmt.Errorf("read backend %d: %w", fl.Owner, err)
	}
	_, to, err := x.bucket(client, s)
	syn := x.Packet.Proto == "tcp" && s.BySource == 0
	long := fl.Ended && setup.Ended != 0 && fl.Seen+uint64(setup.Ended)*uint64(time.Millisecond) <= now
	left := syn && long && fl.ClientReset && !fl.Named
	if err != nil || to == 0 || to == fl.Owner || b.Ifindex != 0 && b.Unwell == 0 && !left {
		return false, "", err
	}
	owner := x.backendName(fl.Owner)
	switch {
	case b.Ifindex == 0 && b.Unwell == bpf.Removed:
		return true, fmt.Sprintf("; the flow's owner, %s, was removed", owner), nil
	case !syn:
		return false, "", nil
	case left:
		return true, fmt.Sprintf("; the client has reset an earlier flow between the same ends at %s, and the agent there has not reported it", owner), nil
	case fl.BothEnds:
		return true, fmt.Sprintf("; an earlier flow between the same ends has ended at %s, and this backend is not well", owner), nil
	case fl.Unanswered && fl.Seen+uint64(answerTime) <= now:
		return true, fmt.Sprintf("; %s is not well, and has left a SYN without an answer, or reset it", owner), nil
	case fl.Unanswered, fl.Reset, long:
		return false, fmt.Sprintf("; it is not well: if it leaves a SYN without an answer for %s, or resets it, the next SYN goes to another backend", answerTime), nil
	}
	return false, "", nil
}

// bucket returns a new flow's bucket and its backend, 0 for none.
func (x *Explainer) bucket(client netip.AddrPort, s bpf.LBLbService) (bucket int, owner move.Backend, err error) {
	bucket = x.Bucket(client)
	var found uint16
	if err := x.Maps.LbRing.Lookup(uint32(number(s)*ring.Buckets+bucket), &found); err != nil {
		return bucket, 0, fmt.Errorf("read the table of new flows: %w", err)
	}
	return bucket, move.Backend(found), nil
}
