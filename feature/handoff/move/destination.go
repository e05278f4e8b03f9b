// SPDX-License-Identifier: Apache-2.0

package move

// DestinationPhase is how far a destination has come.
type DestinationPhase uint8

// The phases of a destination.
const (
	Idle      DestinationPhase = iota
	Restoring                  // the socket is being made
	Flipping                   // it is there, and the load balancer was asked
	Active                     // the application has it, in Epoch
)

func (p DestinationPhase) String() string {
	return [...]string{"idle", "restoring", "flipping", "active"}[p]
}

// Destination is the side that is to have the session.
type Destination struct {
	Phase DestinationPhase
	Epoch Epoch
	Nonce Nonce // of the load balancer's record, once it is active; 0: that load balancer does not say
}

// Receive takes a message.
func (d *Destination) Receive(m Message) Do {
	switch {
	case m.Kind == State && d.Phase == Idle:
		d.Phase, d.Epoch = Restoring, m.Epoch
		return act(Restore)
	case m.Kind == State && d.Phase == Active && m.Epoch == d.Epoch:
		return Do{}.send(d.toSource(Done))
	case m.Kind == Flipped && m.Epoch == d.Epoch && !m.OK && (d.Phase == Flipping || d.Phase == Active):
		d.Phase = Idle
		return act(Discard).send(d.toSource(Failed))
	case m.Kind == Flipped && m.Epoch == d.Epoch && d.Phase == Flipping:
		d.Phase, d.Nonce = Active, m.Nonce
		return act(Deliver).send(d.toSource(Done))
	case m.Kind == Revoked && m.Move == d.Epoch && (d.Phase == Flipping || d.Phase == Active):
		d.Phase = Idle
		return act(Discard)
	}
	return Do{}
}

// Restored says that [Restore] has been done.
func (d *Destination) Restored() Do {
	d.Phase = Flipping
	return d.Retry()
}

// RestoreFailed says that it could not be done.
func (d *Destination) RestoreFailed() Do {
	d.Phase = Idle
	return Do{}.send(d.toSource(Failed))
}

// Retry repeats what has had no answer.
func (d *Destination) Retry() Do {
	if d.Phase != Flipping {
		return Do{}
	}
	return d.Reconnected()
}

// Reconnected asks the load balancer whether the session is still this host's: what it said may have been lost with the
// connection.
func (d *Destination) Reconnected() Do {
	if d.Phase != Flipping && d.Phase != Active {
		return Do{}
	}
	return Do{}.send(Message{Kind: Flip, From: AtDestination, To: AtLoadBalancer, Epoch: d.Epoch})
}

func (d *Destination) toSource(k Kind) Message {
	return Message{Kind: k, From: AtDestination, To: AtSource, Epoch: d.Epoch}
}
