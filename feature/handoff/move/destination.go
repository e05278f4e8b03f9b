// SPDX-License-Identifier: Apache-2.0

package move

// DestinationPhase is the progress of a destination.
type DestinationPhase uint8

const (
	Idle      DestinationPhase = iota
	Restoring                  // the socket is being created
	Flipping                   // the socket exists; Flip is sent
	Active                     // the application has the session, in Epoch
)

func (p DestinationPhase) String() string {
	return [...]string{"idle", "restoring", "flipping", "active"}[p]
}

// Destination is the backend that receives the session.
type Destination struct {
	Phase DestinationPhase
	Epoch Epoch
	Nonce Nonce // of the load balancer's record, in phase Active; 0: unknown
}

// Receive processes a message.
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

// Restored reports the success of [Restore].
func (d *Destination) Restored() Do {
	d.Phase = Flipping
	return d.Retry()
}

// RestoreFailed reports the failure of [Restore].
func (d *Destination) RestoreFailed() Do {
	d.Phase = Idle
	return Do{}.send(d.toSource(Failed))
}

// Retry repeats an unanswered Flip.
func (d *Destination) Retry() Do {
	if d.Phase != Flipping {
		return Do{}
	}
	return d.Reconnected()
}

// Reconnected asks the load balancer whether this host still owns the session. An earlier answer may have been lost
// with the connection.
func (d *Destination) Reconnected() Do {
	if d.Phase != Flipping && d.Phase != Active {
		return Do{}
	}
	return Do{}.send(Message{Kind: Flip, From: AtDestination, To: AtLoadBalancer, Epoch: d.Epoch})
}

func (d *Destination) toSource(k Kind) Message {
	return Message{Kind: k, From: AtDestination, To: AtSource, Epoch: d.Epoch}
}
