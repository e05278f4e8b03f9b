// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
)

// Types shared by the explanations of all features.
type (
	Packet      = feature.Packet
	Explanation = feature.Explanation
	Step        = feature.ExplainStep
)

// explainer builds an explanation.
type explainer struct {
	Explanation
	p  Packet
	ns *netns.Handle
}

func (x *explainer) say(step, format string, a ...any) {
	x.Steps = append(x.Steps, Step{Step: step, Text: fmt.Sprintf(format, a...)})
}

func (x *explainer) warn(step, format string, a ...any) {
	x.Steps = append(x.Steps, Step{Step: step, Text: fmt.Sprintf(format, a...), Warning: true})
}

func (x *explainer) result(format string, a ...any) { x.Result = fmt.Sprintf(format, a...) }

// Explain explains step by step how a packet reaches its socket, from the socket lookup on. It reads the current state
// of the kernel. It needs root.
func Explain(ctx context.Context, r *kernel.Root, p Packet) (*Explanation, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	ns, err := p.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	st, err := state.Read(ctx, r)
	if err != nil {
		return nil, err
	}
	x := &explainer{p: p, ns: ns, Explanation: Explanation{Proto: p.Proto, From: p.From.String(), To: p.To.String(), Netns: ns.String()}}
	done, err := x.connected()
	if err != nil || done {
		return &x.Explanation, err
	}
	for _, u := range feature.UnreadSights(st.Unreadable, p, feature.StageSocket) {
		x.Steps = append(x.Steps, u.ExplainStep)
	}
	s := x.service(st)
	if s != nil {
		s.ExplainEmpty(ctx, time.Now().Add(state.ReasonBudget))
	}
	if s != nil && s.Record.Service.Copy != "" && p.Proto == "udp" {
		x.say("copy", "service %s gets it too: the device's filter copies it before the socket lookup", s.Record.Service.Copy)
	}
	if s != nil && s.Engine == spec.EngineReuseport {
		done, err = x.reuseport(s)
	} else {
		done, err = x.lookup(r, st, s)
	}
	if err == nil && !done {
		err = x.kernels()
	}
	return &x.Explanation, err
}

// ExplainEvery explains a datagram to a broadcast or multicast address. Every socket bound to the address gets it. The
// kernel runs no program for it (__udp4_lib_mcast_deliver in net/ipv4/udp.c).
func ExplainEvery(_ context.Context, _ *kernel.Root, p Packet) (*Explanation, error) {
	ns, err := p.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	x := &explainer{p: p, ns: ns, Explanation: Explanation{Proto: p.Proto, From: p.From.String(), To: p.To.String(), Netns: ns.String()}}
	socks, err := x.dump(1<<sockdiag.Close | 1<<sockdiag.Established)
	if err != nil {
		return nil, err
	}
	arrives, err := x.interfaces()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range socks {
		if s.State == sockdiag.Established && !same(s.Remote, p.From) || !arrives.accepts(s) || kernelScore(s, p) == 0 {
			continue
		}
		n, _ := x.processes(s.Inode)
		if len(n) == 0 {
			n = []string{"a socket without a process"}
		}
		names = append(names, n[0])
	}
	if len(names) == 0 {
		x.result("dropped: no socket is bound to it")
		return &x.Explanation, nil
	}
	slices.Sort(names)
	x.say("sockets", "%d are bound to it", len(names))
	x.result("every socket bound to it: %s", strings.Join(slices.Compact(names), ", "))
	return &x.Explanation, nil
}

// connected looks for a connected socket, because it wins over all listeners.
func (x *explainer) connected() (done bool, err error) {
	// All TCP states except LISTEN, TIME_WAIT and CLOSE. Connected UDP sockets are in state ESTABLISHED.
	states := uint32(1 << sockdiag.Established)
	if x.p.Proto == "tcp" {
		states = 1<<sockdiag.Established | 1<<sockdiag.SynRecv | 1<<sockdiag.FinWait1 | 1<<sockdiag.FinWait2 |
			1<<sockdiag.CloseWait | 1<<sockdiag.LastAck | 1<<sockdiag.Closing | 1<<sockdiag.NewSynRecv
	}
	socks, err := x.dump(states)
	if err != nil {
		return false, err
	}
	arrives, err := x.interfaces()
	if err != nil {
		return false, err
	}
	for _, s := range socks {
		if !arrives.accepts(s) {
			continue
		}
		if same(s.Remote, x.p.From) && same(s.Local, x.p.To) {
			what := "an established TCP session has exactly these addresses: it gets the packet, without a lookup"
			if x.p.Proto == "udp" {
				what = "a connected UDP socket has exactly these addresses: the kernel prefers it, without a lookup"
			}
			x.say("connected sockets", "%s", what)
			x.gives(s, nil)
			return true, nil
		}
		// A UDP socket connected to the source and bound to the wildcard address.
		if x.p.Proto == "udp" && same(s.Remote, x.p.From) && s.Local.Port() == x.p.To.Port() && s.Local.Addr().Unmap().IsUnspecified() {
			x.say("connected sockets", "a UDP socket is connected to the source: the kernel prefers it, without a lookup")
			x.gives(s, nil)
			return true, nil
		}
	}
	x.say("connected sockets", "none has these addresses")
	return false, nil
}

func same(a, b netip.AddrPort) bool {
	return a.Port() == b.Port() && a.Addr().Unmap() == b.Addr().Unmap()
}

func (x *explainer) dump(states uint32) (out []sockdiag.Socket, err error) {
	err = x.ns.Do(func() (err error) {
		out, err = sockdiag.Dump(sockdiag.Query{Proto: x.p.Number(), LocalPort: x.p.To.Port(), States: states})
		return err
	})
	return out, err
}

// service finds the packet's service, and reports a bypassed one.
func (x *explainer) service(st state.State) *state.Service {
	var best *state.Service
	bits := -1
	var bypassed *state.Service
	for i := range st.Services {
		s := &st.Services[i]
		if s.Inode != x.ns.Inode() {
			continue
		}
		n := state.BestEndpoint(s.Endpoints, x.p.Number(), x.p.To)
		switch {
		case n < 0:
		case s.Bypassed:
			bypassed = s
		case n > bits:
			best, bits = s, n
		}
	}
	if bypassed != nil {
		x.warn("bypass", "service %s would get it, but is bypassed: weir bypass --off %s steers it again", bypassed.Name, bypassed.Name)
	}
	return best
}

// findEndpoint returns a service's endpoint for the packet.
func (x *explainer) findEndpoint(s *state.Service) int {
	best := -1
	for i, ep := range s.Endpoints {
		if ep.Proto == x.p.Number() && ep.Port == x.p.To.Port() && ep.Prefix.Contains(x.p.To.Addr()) &&
			(best < 0 || ep.Prefix.Bits() > s.Endpoints[best].Prefix.Bits()) {
			best = i
		}
	}
	return best
}

// lookup follows the sk_lookup hook of the namespace. s may be nil.
func (x *explainer) lookup(r *kernel.Root, st state.State, s *state.Service) (done bool, err error) {
	programs, err := kernel.LookupPrograms(x.ns.FD())
	if err != nil {
		x.say("sk_lookup", "%v", err)
	}
	ours := false
	var foreign []string
	for _, p := range programs {
		if p.Name == bpf.SteerProgSteerLookup || p.Name == bpf.SteerProgSteerDispatch {
			ours = true
			continue
		}
		foreign = append(foreign, fmt.Sprintf("%s (program %d)", p.Name, p.ID))
	}
	switch {
	case err == nil && len(programs) == 0:
		x.say("sk_lookup", "no program is attached in this namespace")
	case ours:
		x.say("sk_lookup", "weir's program is attached")
	}
	if len(foreign) > 0 {
		x.warn("sk_lookup", "foreign programs run there too, and the last program to choose a socket decides: %s", strings.Join(foreign, ", "))
	}
	if ours {
		to, endpoint, done, err := x.bound(r, st, s)
		if err != nil || done {
			return done, err
		}
		if to != nil {
			return x.steered(to, endpoint)
		}
	}
	if s == nil {
		if ours {
			x.say("service", "none listens on %s %s", x.p.Proto, x.p.To)
		}
		return false, nil
	}
	if err == nil && !ours {
		x.warn("sk_lookup", "service %s is published, but its program is not attached: weir apply recovers it", s.Name)
		return false, nil
	}
	return x.steered(s, x.findEndpoint(s))
}

// processes names the processes with an open descriptor of a socket.
func (x *explainer) processes(inode uint32) (names []string, first int) {
	pids := state.PIDs(inode)
	for _, pid := range pids {
		names = append(names, state.ProcessName(pid))
	}
	if len(pids) > 0 {
		first = pids[0]
	}
	return names, first
}

// gives ends an explanation with the receiving socket.
func (x *explainer) gives(s sockdiag.Socket, slot *int) {
	names, pid := x.processes(s.Inode)
	who := "a socket without a process"
	if len(names) > 0 {
		who = strings.Join(names, ", ")
	}
	x.PID, x.Slot = pid, slot
	if slot != nil {
		who = fmt.Sprintf("slot %d: %s", *slot, who)
	}
	x.result("%s, at %s", who, s.Local)
}
