// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/awake"
)

// handle processes a backend's message. Messages are serialized by mu.
func (a *Agent) handle(c *peer.Conn, in peer.Frame) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.decide(c, in)
}

// decide processes a message. The caller holds mu.
func (a *Agent) decide(c *peer.Conn, in peer.Frame) error {
	from := c.Peer.Number
	if a.backends[from] != c {
		return nil // of a replaced connection: nobody receives the answer
	}
	k := a.f.flowKey(in.Flow.Client, int(in.Flow.Service))
	if in.Message.Kind == move.Left {
		return a.redirect(k, from, in.Message)
	}
	var answers [2]move.Message
	var owner move.Backend // before the change
	var tooEarly bool
	change := func() (Flow, error) {
		return a.f.Change(k, func(fl *Flow) {
			owner = fl.Owner
			if tooEarly = a.tooEarly(k, fl, from, in.Message); tooEarly {
				return
			}
			answers = fl.Receive(from, in.Message, a.gone(fl))
			if in.Message.Kind == move.Flip && answers[0].OK {
				fl.Incarnation = c.Peer.Instance
			}
		})
	}
	now, err := change()
	if errors.Is(err, errNoFlow) && in.Message.Kind == move.Ask && a.startup == nil && k.Client.Port() != 0 && a.f.serves(from, k.Service) {
		// The flow was forgotten after a long silence. The asking backend has the session.
		if err = a.report(k, from, move.Flow{Owner: from}); err == nil || errors.Is(err, ebpf.ErrKeyExist) {
			now, err = change()
		}
	}
	if errors.Is(err, errNoFlow) && a.startup != nil {
		return nil // the backends are still reporting their sessions; the sender repeats its request
	}
	if errors.Is(err, errNoFlow) { // ended by the client, or never known
		answers = (&move.Flow{}).Receive(from, in.Message, false)
	} else if err != nil {
		return err
	}
	if tooEarly {
		a.wait(k, c, in)
		return nil
	}
	if answers[0].Kind == 0 {
		return fmt.Errorf("%s is not for load balancers", in.Message.Kind)
	}
	tell := func() error { return errors.Join(a.send(from, in, answers[0]), a.send(owner, in, answers[1])) }
	if err != nil || !answers[0].OK || in.Message.Kind == move.Ask {
		err := tell()
		if in.Message.Kind == move.Reclaim {
			a.o.Step(stepToldGone)
		}
		return err
	}
	if in.Message.Kind == move.Buffer { // after the answer the owner relies on the buffering
		awake.For(awake.Moment)
		a.o.Step(stepBuffering)
		if err := a.follow(k, now, in.Message.Kind); err != nil {
			return err
		}
		a.o.Step(stepBuffered) // buffering may be off: see move.Source.Parks
		err := tell()
		a.o.Step(stepToldBuffering)
		if e := a.early[k]; e != nil {
			err = errors.Join(err, e.now())
		}
		return err
	}
	// The decision is made. The new owner may begin while packets are released.
	if in.Message.Kind == move.Flip {
		a.o.Step(stepFlipped)
	}
	err = tell()
	if in.Message.Kind == move.Flip {
		a.o.Step(stepToldFlipped)
	}
	err = errors.Join(err, a.follow(k, now, in.Message.Kind))
	if in.Message.Kind == move.Flip {
		a.o.Step(stepLetGo)
	}
	return err
}

// follow applies a decision to the data path. The caller holds mu.
func (a *Agent) follow(k Key, now Flow, kind move.Kind) error {
	if t := a.timers[k]; t != nil {
		t.Stop()
		delete(a.timers, k)
	}
	if kind == move.Buffer {
		if now.Buffering {
			if err := a.f.Buffer(k); err != nil {
				return err
			}
		}
		a.timers[k] = a.after(a.o.BufferTimeout, func() { a.expire(k, now.Epoch) })
		return nil
	}
	_, err := a.f.Flush(k)
	return err
}

// gone reports whether the owner's agent has ended since it acquired the flow. Until then nobody can reclaim the flow. The
// incarnation is in the flow's record, so it survives a restart of this agent.
func (a *Agent) gone(fl *Flow) bool {
	h := a.backends[fl.Owner]
	return h == nil || fl.Incarnation != 0 && h.Peer.Instance != fl.Incarnation
}

func (a *Agent) send(to move.Backend, in peer.Frame, m move.Message) error {
	c := a.backends[to]
	if m.Kind == 0 || c == nil {
		return nil
	}
	return c.Send(peer.Frame{Message: m, Flow: in.Flow, Instance: c.Peer.Instance})
}
