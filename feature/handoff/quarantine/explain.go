// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// returnTime is RETURN_NS of quarantine.bpf.c: how long packets are sent back to the load balancer.
const returnTime = 250 * time.Millisecond

// Explain returns the treatment of a TCP packet by the quarantine of its network namespace. It changes nothing.
func Explain(r *kernel.Root, p feature.Packet) ([]feature.Verdict, error) {
	all, unreadable, err := Store.In(r, strconv.FormatUint(p.Inode, 10))
	if err != nil {
		return nil, err
	}
	out := feature.UnreadSights(unreadable, p, feature.StageTC)
	for _, rec := range all {
		v, err := explain(r, rec.Instance, p)
		if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, netns.ErrGone) {
			continue // gone, or damaged: the host reports it
		} else if err != nil {
			return nil, fmt.Errorf("explain the quarantine: %w", err)
		}
		out = append(out, v...)
	}
	return out, nil
}

func explain(r *kernel.Root, i kernel.Instance, p feature.Packet) ([]feature.Verdict, error) {
	if p.Proto != "tcp" {
		return nil, nil
	}
	use, err := Store.Open(r, i, pinSessions)
	if err != nil {
		return nil, err
	}
	defer use.Close()
	g := &Quarantine{sessions: use.Pins.Maps[pinSessions]}
	f := repair.Flow{Local: p.To, Remote: p.From}
	e, known, err := g.Lookup(f)
	if err != nil {
		return nil, err
	}
	s := feature.Verdict{Stage: feature.StageTC, ExplainStep: feature.ExplainStep{Step: "quarantine"}}
	attached, err := meets(use, p, &s)
	switch {
	case err != nil:
		return nil, err
	case attached && known:
		e.tell(&s, bufferThere(use.Netns))
	case attached:
		s.Text = "no session between these addresses is moving or has moved: it passes"
	case known:
		s.Text, s.Warning = fmt.Sprintf("it has the session, and is attached to %s, not to %s: the packet passes", strings.Join(use.Spec, ", "), p.Interface), true
		if slices.Contains(use.Spec, p.Interface) {
			s.Text = fmt.Sprintf("it has the session, and is not attached to %s: the packet passes; %s", p.Interface, feature.DeviceRemedy)
		}
	default:
		return nil, nil
	}
	return []feature.Verdict{s}, nil
}

// meets reports whether the quarantine is attached at the packet's interface, and fills in its position among the
// programs there.
func meets(use *instances.InUse[[]string], p feature.Packet, s *feature.Verdict) (attached bool, err error) {
	if !slices.Contains(use.Spec, p.Interface) {
		return false, nil
	}
	names, err := use.Pins.Links()
	if err != nil {
		return false, err
	}
	err = use.Netns.Do(func() error {
		d, err := net.InterfaceByName(p.Interface)
		if err != nil {
			return nil //nolint:nilerr // it went this instant
		}
		if len(names) == 0 {
			at := filterAt(d.Index, false)
			id, err := at.Program()
			attached, s.Order = id != 0, int32(at.Priority)
			return err
		}
		ln, err := use.Pins.Link(linkIn + strconv.Itoa(d.Index))
		if errors.Is(err, kernel.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		defer ln.Close()
		at, ok, err := kernel.PositionAt(kernel.TCX{Ifindex: d.Index, Device: d.Name}, ln)
		if errors.Is(err, kernel.ErrDetached) {
			return nil
		}
		attached, s.Order = ok, int32(at.Number)
		return err
	})
	return attached, err
}

// bufferThere reports whether the buffer device exists. It ends with the agent.
func bufferThere(ns *netns.Handle) (there bool) {
	_ = ns.Do(func() error {
		_, err := net.InterfaceByName(bufferName)
		there = err == nil
		return nil
	})
	return there
}

// tell describes the treatment of a session's packet, like quarantine_in in quarantine.bpf.c.
func (e Entry) tell(s *feature.Verdict, buffer bool) {
	leaves := fmt.Sprintf("the session leaves this backend (epoch %d), and nothing reaches its socket", e.Epoch)
	switch age := time.Duration(kernel.Monotonic() - e.Since); {
	case e.State == Quiet:
		s.Text = fmt.Sprintf("the session arrives at this backend (epoch %d): the packet passes; RST and FIN are blocked until its socket has sent a packet", e.Epoch)
	case e.State == Pass:
		s.Text = "the session's departure was abandoned: the packet passes"
	case e.State == Left:
		s.Text, s.Warning = fmt.Sprintf("the session has left for backend number %d: a SYN starts a new one and passes; other packets are dropped, and reported to the load balancer", e.To), true
	case e.State == Buffered && buffer:
		s.Text, s.Result = leaves, "buffered at "+bufferName+": the session leaves this backend"
	case e.State == Buffered:
		s.Text, s.Warning, s.Result = leaves, true, "dropped: the session leaves this backend, and the agent with its buffered packets is gone: run weir serve"
	case age < returnTime:
		s.Text, s.Result = leaves, "sent back to the load balancer: the session leaves this backend"
	default:
		s.Text, s.Warning, s.Result = leaves+fmt.Sprintf(" for %s now: packets of the first %s went back to the load balancer", age.Round(time.Millisecond), returnTime), true,
			"dropped: the session leaves this backend"
	}
}
