// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// steered follows the program: service, policy, slot, socket. done is false if the program leaves the packet to the
// kernel.
func (x *explainer) steered(s *state.Service, e int) (done bool, err error) {
	x.say("service", "%s, by its listen %q", s.Name, s.Listen[s.Endpoints[e].Listen])
	if len(s.Slots) == 0 {
		x.result("rejected: %s", s.Problem)
		return true, nil
	}
	slot, hash, known := x.policy(s)
	if !known {
		return true, nil
	}
	return x.slot(s, e, slot, hash)
}

// policy returns the packet's slot, if it is predictable.
func (x *explainer) policy(s *state.Service) (slot int, hash uint32, known bool) {
	switch s.By {
	case spec.ByPacket:
		x.say("policy", "by packet: each CPU distributes its packets in turn, so the slot is not predictable")
		x.result("one of %d slots, in turn", len(s.Slots))
		return 0, 0, false
	case spec.ByCPU:
		x.say("policy", "by cpu: slot = number of the receiving CPU modulo %d, so the slot is not predictable", len(s.Slots))
		x.result("the slot of the receiving CPU")
		return 0, 0, false
	case spec.ByFlow, spec.ByQUIC:
		hash = state.HashFlow(s.Seed, x.p.Number(), x.p.From, x.p.To)
		b := int(hash & (spec.Buckets - 1))
		slot = int(s.Table[b])
		if s.By == spec.ByQUIC && x.p.Proto == "udp" {
			x.say("policy", "by quic: the slot in the connection id; without one, as in Initials, by the flow")
		}
		x.say("policy", "by flow: addresses, ports and protocol hash to bucket %d of slot %d%s", b, slot, x.byHand(s, b))
		return slot, hash, true
	}
	m, err := s.Mapping(state.WhatIf{})
	if err != nil {
		x.result("%v", err)
		return 0, 0, false
	}
	a := x.p.From.Addr()
	p := m.Assign(a)
	stands := m.Devices.Stands(a)
	what := fmt.Sprintf("the source %s", a)
	if s.By == spec.ByDevice {
		if p.Device != "" {
			what = fmt.Sprintf("%s belongs to device %s; its address %s", a, p.Device, stands)
		} else {
			x.warn("device", "%s is not in %s: it counts as a separate device", a, s.DevicesFile)
		}
	}
	tabled := int(m.Table[p.Bucket])
	x.say("policy", "by %s: %s hashes to bucket %d of slot %d%s", s.By, what, p.Bucket, tabled, x.byHand(s, p.Bucket))
	if p.Moved {
		x.say("moved", "weir steer move moved this device to slot %d", p.Slot)
	}
	return p.Slot, spec.Hash(s.Seed, stands), true
}

func (x *explainer) byHand(s *state.Service, bucket int) string {
	if _, ok := s.Placed[bucket]; ok {
		return " (moved by weir steer move)"
	}
	return ""
}

// slot explains the delivery to the slot's member, or the action of an empty slot.
func (x *explainer) slot(s *state.Service, endpoint, slot int, hash uint32) (done bool, err error) {
	st := s.Slots[slot]
	if done, err := x.before(s, endpoint, slot); done || err != nil {
		return done, err
	}
	if st.Admitted() {
		x.say("slot", "slot %d is admitted: %s", slot, MemberText(s, st))
		return true, x.socket(s, endpoint, slot)
	}
	x.say("slot", "slot %d is empty: %s", slot, st.Reason)
	switch s.OnEmpty {
	case spec.Next:
		whole := make([]bool, len(s.Slots))
		for i := range whole {
			whole[i] = s.Slots[i].Admitted()
		}
		if at, ok := state.Divert(whole, slot, hash); ok {
			x.say("on_empty", "next: slot %d gets it meanwhile", at)
			return true, x.socket(s, endpoint, at)
		}
		x.say("on_empty", "next: no other slot has a member, so it is rejected")
	case spec.Drop:
		if s.Problem != state.ProblemSocketHolder {
			x.say("on_empty", "drop")
			x.result("dropped silently")
			return true, nil
		}
		x.warn("on_empty", "drop, but %s", s.Problem)
	case spec.Pass:
		return x.passes(s), nil
	default:
		x.say("on_empty", "reject")
	}
	if x.p.Proto == "tcp" {
		x.result("rejected: TCP reset")
	} else {
		x.result("rejected: ICMP port unreachable")
	}
	return true, nil
}

// passes explains on_empty: pass. Engine sk_lookup leaves the packet to the kernel. Engine sk_reuseport chooses like
// the kernel, but never the holder's socket.
func (x *explainer) passes(s *state.Service) (done bool) {
	if s.Engine != spec.EngineReuseport {
		x.say("on_empty", "pass: the kernel chooses")
		return false
	}
	var others []string
	for _, slot := range s.Slots {
		if slot.Admitted() {
			others = append(others, strconv.Itoa(slot.Slot))
		}
	}
	x.say("on_empty", "pass: the kernel's hash of the flow chooses among the slots with a member")
	if len(others) == 0 {
		x.result("rejected: no slot has a member")
	} else {
		x.result("the member of one of the slots %s", strings.Join(others, ", "))
	}
	return true
}

// MemberText describes the member of a slot.
func MemberText(of *state.Service, s slots.State) string {
	if s.Occupant == "" {
		s.Occupant = of.Occupant(s)
	}
	if s.Member == "" {
		return fmt.Sprintf("process %d, admitted by an operator", s.PID)
	}
	if s.Occupant != "" {
		return fmt.Sprintf("%s, admitted in place of %s", s.Occupant, s.Member)
	}
	return fmt.Sprintf("process %d, found as %s", s.PID, s.Member)
}

// socket ends the explanation with a slot's socket for an endpoint.
func (x *explainer) socket(s *state.Service, endpoint, slot int) error {
	return x.given(s, endpoint, slot, s.Slots[slot].Sockets[endpoint].Cookie)
}

// given ends the explanation with a socket of a slot's member or of its predecessor.
func (x *explainer) given(s *state.Service, endpoint, slot int, cookie uint64) error {
	socks, err := x.dumpAll()
	if err != nil {
		return err
	}
	for _, sk := range socks {
		if sk.Cookie == cookie {
			x.say("socket", "%s of slot %d (cookie %d)", s.Endpoints[endpoint], slot, cookie)
			x.gives(sk, &slot)
			return nil
		}
	}
	x.warn("socket", "%s of slot %d cannot receive: it was connected or closed since", s.Endpoints[endpoint], slot)
	x.result("rejected: the slot's socket cannot receive")
	return nil
}

// dumpAll lists listeners or unconnected sockets at all ports, because a member may be bound to another port.
func (x *explainer) dumpAll() (out []sockdiag.Socket, err error) {
	err = x.ns.Do(func() (err error) {
		out, err = sockdiag.Dump(sockdiag.Query{Proto: x.p.Number(), States: x.listening()})
		return err
	})
	return out, err
}

func (x *explainer) listening() uint32 {
	if x.p.Proto == "tcp" {
		return 1 << sockdiag.Listen
	}
	return 1 << sockdiag.Close
}

// kernels explains the kernel's own choice.
func (x *explainer) kernels() error {
	best, others, err := x.fitting()
	if err != nil {
		return err
	}
	switch len(best) {
	case 0:
		x.say("kernel", "no socket listens on %s %s", x.p.Proto, x.p.To)
		if x.p.Proto == "tcp" {
			x.result("rejected: TCP reset, no listener")
		} else {
			x.result("rejected: ICMP port unreachable, no listener")
		}
	case 1:
		x.say("kernel", "the most specific socket gets it%s", others)
		x.gives(best[0], nil)
	default:
		x.say("kernel", "%d sockets match equally, as a reuseport group: a hash of the flow chooses among them%s", len(best), others)
		var names []string
		for _, s := range best {
			n, _ := x.processes(s.Inode)
			if len(n) == 0 {
				n = []string{"a socket that no process has open"}
			}
			names = append(names, n[0])
		}
		slices.Sort(names)
		x.result("one of %s", strings.Join(slices.Compact(names), ", "))
	}
	return nil
}

// fitting returns the candidates of the kernel's own choice, and a remark about less specific sockets.
func (x *explainer) fitting() (best []sockdiag.Socket, remark string, err error) {
	socks, err := x.dump(x.listening())
	if err != nil {
		return nil, "", err
	}
	arrives, err := x.interfaces()
	if err != nil {
		return nil, "", err
	}
	score, less := 0, 0
	for _, s := range socks {
		n := kernelScore(s, x.p)
		switch {
		case n == 0, !arrives.accepts(s):
		case n > score:
			less += len(best)
			best, score = []sockdiag.Socket{s}, n
		case n == score:
			best = append(best, s)
		default:
			less++
		}
	}
	if less > 0 {
		remark = fmt.Sprintf("; %d less specific sockets do not", less)
	}
	return best, remark, nil
}

// kernelScore follows compute_score of net/ipv4 and net/ipv6 with the data of sock_diag. 0 means that the socket does
// not match.
func kernelScore(s sockdiag.Socket, p Packet) int {
	local := s.Local.Addr().Unmap()
	score := 1
	switch {
	case p.Family() == unix.AF_INET6 && s.Family != unix.AF_INET6:
		return 0
	case p.Family() == unix.AF_INET && s.Family == unix.AF_INET6:
		if s.V6Only {
			return 0
		}
	case s.Family == p.Family():
		score++ // same family
	}
	if !local.IsUnspecified() {
		if local != p.To.Addr().Unmap() {
			return 0
		}
		score += 4 // looked up before wildcards
	}
	if s.Interface != 0 {
		score += 2 // if the packet arrives there
	}
	return score
}

// reuseport follows engine sk_reuseport: the kernel selects a group, then the group's program selects a socket in it.
func (x *explainer) reuseport(s *state.Service) (done bool, err error) {
	best, _, err := x.fitting()
	if err != nil {
		return false, err
	}
	endpoint := x.findEndpoint(s)
	ours := map[uint64]bool{}
	for _, slot := range s.Slots {
		if len(slot.Sockets) > endpoint {
			ours[slot.Sockets[endpoint].Cookie] = true
		}
	}
	inGroup := slices.ContainsFunc(best, func(sk sockdiag.Socket) bool { return ours[sk.Cookie] }) || x.sharesGroup(s, endpoint, best)
	switch {
	case len(best) == 0:
		x.warn("reuseport group", "no socket is bound to %s %s: there is no group, and no program runs", x.p.Proto, x.p.To)
		return false, nil
	case !inGroup:
		var who []string
		for _, sk := range best {
			names, _ := x.processes(sk.Inode)
			who = append(who, fmt.Sprintf("%s of %s", sk.Local, strings.Join(names, ", ")))
		}
		x.warn("reuseport group", "a more specific socket gets the traffic instead of service %s: %s", s.Name, strings.Join(who, "; "))
		return false, nil
	}
	x.say("reuseport group", "the sockets bound to %s are a group, and weir's program chooses among them", best[0].Local)
	return x.steered(s, x.findEndpoint(s))
}

// sharesGroup reports whether a socket is bound like the service's listen although no member has one. The socket holder
// then keeps the group.
func (x *explainer) sharesGroup(s *state.Service, endpoint int, best []sockdiag.Socket) bool {
	p := s.Endpoints[endpoint].Prefix
	return slices.ContainsFunc(best, func(sk sockdiag.Socket) bool {
		a := sk.Local.Addr().Unmap()
		return a.IsUnspecified() && p.Bits() == 0 || p.IsSingleIP() && a == p.Addr()
	})
}
