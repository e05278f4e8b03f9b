// SPDX-License-Identifier: Apache-2.0

package move

import "fmt"

// SourcePhase is the progress of a source.
type SourcePhase uint8

const (
	Owns       SourcePhase = iota // the application has the session, in Epoch
	Holding                       // Buffer is sent; packets still arrive
	Moving                        // stopped and dumped; State may be sent
	Reclaiming                    // Reclaim is sent
	Closed                        // another backend has the session
)

func (p SourcePhase) String() string {
	return [...]string{"owns", "buffering", "moving", "reclaiming", "closed"}[p]
}

// Source is the backend that has the session. The zero value owns it in epoch 0.
type Source struct {
	Phase SourcePhase
	Epoch Epoch // of its ownership; during a move, of the move
	To    Backend
	Sent  bool // the state may have been sent: the destination may own the session
	// Nonce is the load balancer's nonce of the session, at most a minute old. With it a move need not wait for the
	// load balancer: see [Source.Ahead].
	Nonce Nonce
	// Parks makes the source buffer the packets of a moving session, in place of the load balancer.
	Parks bool
}

// Resumed returns the source of a session after its agent died during the move of that epoch. The socket survived in
// another process. stopped means it was found stopped: its state may have been sent. The nonce is the one from the
// move's start.
func Resumed(e Epoch, b Nonce, stopped bool) Source {
	return Source{Phase: Reclaiming, Epoch: e, Sent: stopped, Nonce: b}
}

// Start begins a move. It fails while another is under way.
func (s *Source) Start(to Backend) (Do, error) {
	if s.Phase != Owns {
		return Do{}, fmt.Errorf("the session is %s in epoch %d: wait until its move has ended", s.Phase, s.Epoch)
	}
	s.Phase, s.Epoch, s.To, s.Sent = Holding, s.Epoch+1, to, false
	return s.buffer(), nil
}

// Ahead continues the move without the load balancer's answer, if the record's nonce is known. Call it after sending
// the messages of Start. If Buffer never arrives at the load balancer, the nonce proves it, and the load balancer
// returns the session. Without a nonce Ahead does nothing.
func (s *Source) Ahead() Do {
	if s.Phase != Holding || s.Nonce == 0 {
		return Do{}
	}
	s.Phase = Moving
	return act(Dump)
}

func (s *Source) buffer() Do {
	return Do{}.send(Message{Kind: Buffer, From: AtSource, To: AtLoadBalancer, Epoch: s.Epoch, Backend: s.To, OK: s.Parks})
}

// Retry repeats unanswered messages, after a timeout or a broken connection. It reclaims a move in phase [Moving]:
// call it then only after the move's timeout, or if the destination is gone.
func (s *Source) Retry() Do {
	switch s.Phase {
	case Holding:
		s.Nonce = 0 // after two Buffers one rejection proves nothing: see Receive
		return s.buffer()
	case Moving:
		s.Phase = Reclaiming
		fallthrough
	case Reclaiming:
		return Do{}.send(Message{Kind: Reclaim, From: AtSource, To: AtLoadBalancer, Epoch: s.Epoch, Nonce: s.Nonce})
	}
	return Do{}
}

// Dumped reports the success of [Dump].
func (s *Source) Dumped() Do {
	s.Sent = true
	return Do{}.send(Message{Kind: State, From: AtSource, To: AtDestination, Epoch: s.Epoch})
}

// DumpFailed reports the failure of [Dump]. The session stays here.
func (s *Source) DumpFailed() Do {
	s.Phase = Reclaiming
	return s.Retry()
}

// Receive processes a message. Late and repeated messages have no effect.
func (s *Source) Receive(m Message) Do {
	switch {
	case m.Kind == Buffered && m.Epoch == s.Epoch && s.Phase == Holding:
		if !m.OK { // it is being moved, or the load balancer has another epoch or no record: nothing was stopped or lost
			s.Phase = Reclaiming
			return s.Retry()
		}
		s.Phase = Moving
		return act(Dump)
	case m.Kind == Buffered && m.Epoch == s.Epoch && (s.Phase == Moving || s.Phase == Reclaiming) && s.Nonce != 0 && !m.OK:
		// The source went ahead with its only Buffer. No backend can acquire the session by this move, even after a
		// sent State.
		s.Sent = false
		if s.Phase == Moving {
			return s.Retry()
		}
	case (m.Kind == Done || m.Kind == Failed) && m.Epoch == s.Epoch && s.Phase == Moving:
		return s.Retry() // the load balancer decides: the destination may have died since
	case m.Kind == Reclaimed && m.Move == s.Epoch && s.Phase == Reclaiming:
		switch {
		case m.OK:
			s.Epoch = m.Epoch
		case s.Sent:
			s.Phase = Closed
			return act(Close)
		default: // no other backend can acquire it by this move: the load balancer's record is unchanged
			s.Epoch++
			s.Nonce = 0
		}
		s.Phase, s.Sent = Owns, false
		return act(Thaw)
	}
	return Do{}
}
