// SPDX-License-Identifier: Apache-2.0

package move

import "fmt"

// SourcePhase is how far a source has come.
type SourcePhase uint8

// The phases of a source.
const (
	Owns       SourcePhase = iota // in Epoch: the application has the session
	Holding                       // the load balancer was asked to hold; packets still come
	Moving                        // stopped and dumped; the destination was told
	Reclaiming                    // the load balancer is asked what became of the session
	Closed                        // another backend has it
)

func (p SourcePhase) String() string {
	return [...]string{"owns", "buffering", "moving", "reclaiming", "closed"}[p]
}

// Source is the side that has the session. The zero value owns it in epoch 0.
type Source struct {
	Phase SourcePhase
	Epoch Epoch // in which it owns the session; of the move, once one has begun
	To    Backend
	Sent  bool // the state of this move may have been sent: the destination may own the session
	// Birth is of the load balancer's record of the session, heard lately. With it a move need not wait for the load balancer: see [Source.Ahead].
	Nonce Nonce
	// Parks says that packets wait at the source while the session moves, and not at the load balancer.
	Parks bool
}

// Resumed is the source of a session whose agent died in the midst of the move of that epoch, when another process had the
// socket. stopped says that the socket was found stopped: its state may have been sent. The birth is the one that the move began with.
func Resumed(e Epoch, b Nonce, stopped bool) Source {
	return Source{Phase: Reclaiming, Epoch: e, Sent: stopped, Nonce: b}
}

// Start begins a move. It is an error while another is under way.
func (s *Source) Start(to Backend) (Do, error) {
	if s.Phase != Owns {
		return Do{}, fmt.Errorf("the session is %s in epoch %d: wait until its move has ended", s.Phase, s.Epoch)
	}
	s.Phase, s.Epoch, s.To, s.Sent = Holding, s.Epoch+1, to, false
	return s.buffer(), nil
}

// Ahead goes on, once what Start has asked for is sent, without waiting for the answer, where the record's birth is known: should the
// load balancer never have heard of the move it can tell then, and gives the session back. Else it does nothing.
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

// Retry repeats what has had no answer for some time, or for the connection that broke. A move that the destination does not
// finish is reclaimed: call it for [Moving] only when the time for the move is over, or the destination is gone.
func (s *Source) Retry() Do {
	switch s.Phase {
	case Holding:
		s.Nonce = 0 // of what is said twice one no says nothing: see Receive
		return s.buffer()
	case Moving:
		s.Phase = Reclaiming
		fallthrough
	case Reclaiming:
		return Do{}.send(Message{Kind: Reclaim, From: AtSource, To: AtLoadBalancer, Epoch: s.Epoch, Nonce: s.Nonce})
	}
	return Do{}
}

// Dumped says that [Dump] has been done.
func (s *Source) Dumped() Do {
	s.Sent = true
	return Do{}.send(Message{Kind: State, From: AtSource, To: AtDestination, Epoch: s.Epoch})
}

// DumpFailed says that the socket cannot be dumped now. It stays here.
func (s *Source) DumpFailed() Do {
	s.Phase = Reclaiming
	return s.Retry()
}

// Receive takes a message. One that is late or comes twice changes nothing.
func (s *Source) Receive(m Message) Do {
	switch {
	case m.Kind == Buffered && m.Epoch == s.Epoch && s.Phase == Holding:
		if !m.OK { // it is being moved, or the load balancer knows another epoch, or not the session: nothing was stopped, so nothing is lost
			s.Phase = Reclaiming
			return s.Retry()
		}
		s.Phase = Moving
		return act(Dump)
	case m.Kind == Buffered && m.Epoch == s.Epoch && (s.Phase == Moving || s.Phase == Reclaiming) && s.Nonce != 0 && !m.OK:
		// It went ahead, and Hold was said once: nobody ever has the session by this move, whatever was sent.
		s.Sent = false
		if s.Phase == Moving {
			return s.Retry()
		}
	case (m.Kind == Done || m.Kind == Failed) && m.Epoch == s.Epoch && s.Phase == Moving:
		return s.Retry() // the load balancer has the last word: the destination may have died since
	case m.Kind == Reclaimed && m.Move == s.Epoch && s.Phase == Reclaiming:
		switch {
		case m.OK:
			s.Epoch = m.Epoch
		case s.Sent:
			s.Phase = Closed
			return act(Close)
		default: // nobody else can have it by this move: what the load balancer does not know of it stays as it was
			s.Epoch++
			s.Nonce = 0
		}
		s.Phase, s.Sent = Owns, false
		return act(Thaw)
	}
	return Do{}
}
