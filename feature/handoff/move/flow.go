// SPDX-License-Identifier: Apache-2.0

package move

// Flow is what a load balancer knows of a session. It is kept where the data path reads it, and outlives the load balancer's agent.
type Flow struct {
	Owner       Backend
	Epoch       Epoch   // in which Owner owns it
	To          Backend // who may have it in epoch Epoch+1; 0: nobody
	Buffering   bool    // packets to the owner are held meanwhile
	Predecessor Backend // the owner before, as long as Owner has said nothing: it may get the session back; 0: nobody may
	Nonce       Nonce   // of this record; 0: it was made by a load balancer that chose none
}

// farAhead is more epochs than a load balancer can be behind an owner's: no destination is to use up those of a session.
const farAhead = 1 << 16

// Receive takes a message from a backend, and returns the answers. gone says that the life of the owner's agent has ended that
// flipped the flow, or the latest of those that did.
func (f *Flow) Receive(from Backend, m Message, gone bool) (answers [2]Message) {
	switch m.Kind {
	case Buffer:
		// The owner may know of moves that were forgotten here: its epoch is the later one then.
		ok := f.Owner == from && m.Epoch > f.Epoch && (!f.Buffering || f.To == m.Backend) && m.Backend != from && m.Backend != 0
		if ok {
			f.Buffering, f.To, f.Epoch = !m.OK, m.Backend, m.Epoch-1
		}
		answers[0] = Message{Kind: Buffered, To: AtSource, Epoch: m.Epoch, OK: ok}
	case Flip:
		ok := f.Owner == from && f.Epoch == m.Epoch // it is the second time
		if !ok && f.To == from && m.Epoch == f.Epoch+1 {
			*f = Flow{Owner: from, Epoch: m.Epoch, Predecessor: f.Owner, Nonce: f.Nonce}
			ok = true
		}
		if !ok && f.Nonce != 0 && f.Owner != from && m.Epoch > f.Epoch && m.Epoch-f.Epoch < farAhead && (f.To == 0 || f.To == from) {
			// It was faster than its Hold, which is too late now: of a move that was refused once nothing may come, or the destination
			// would give up, by the first answer, what the second one gives it.
			f.Buffering, f.To, f.Epoch = false, 0, m.Epoch
		}
		answers[0] = Message{Kind: Flipped, To: AtDestination, Epoch: m.Epoch, OK: ok, Nonce: f.Nonce}
	case Ask:
		answers[0] = Message{Kind: Known, To: AtSource, Epoch: f.Epoch, OK: f.Owner == from && f.To == 0, Nonce: f.Nonce}
	case Reclaim:
		answers = f.reclaim(from, m, gone)
	}
	for i := range answers {
		answers[i].From = AtLoadBalancer
	}
	return answers
}

func (f *Flow) reclaim(from Backend, m Message, gone bool) (answers [2]Message) {
	answers[0] = Message{Kind: Reclaimed, To: AtSource, Move: m.Epoch}
	switch {
	case f.Owner == from && m.Epoch == f.Epoch+1 && f.To != 0: // held or not: what is on its way to the destination is too late now
		f.Buffering, f.To, f.Epoch = false, 0, m.Epoch+1
	case f.Owner == from && m.Nonce == f.Nonce && m.Nonce != 0 && (m.Epoch > f.Epoch || m.Epoch == f.Epoch && f.To == 0):
		// Hold was never heard in time, and is too late now.
		f.Buffering, f.To, f.Epoch = false, 0, m.Epoch+1
	case f.Owner == from && m.Epoch < f.Epoch: // given back already: no Flip of that move is heard any more
	case f.Owner != from && f.Predecessor == from && f.Epoch == m.Epoch && gone:
		*f = Flow{Owner: from, Epoch: m.Epoch + 1, Nonce: f.Nonce}
		answers[1] = Message{Kind: Revoked, To: AtDestination, Epoch: f.Epoch, Move: m.Epoch}
	default: // it is gone, for good; or of this move nothing is known here, and the source knows whether it has sent anything
		if f.Predecessor == from && f.Epoch == m.Epoch { // what is late, of a move before, is not about this copy
			f.Predecessor = 0
		}
		return answers
	}
	answers[0].OK, answers[0].Epoch = true, f.Epoch
	return answers
}

// Left takes the word of a backend that a session has left it for another, in an epoch: the record was forgotten, and made anew by a
// packet that went by the hash. It says whether that changes the flow.
func (f *Flow) Left(from, to Backend, e Epoch) bool {
	if f.Owner != from || to == 0 || to == from || f.To != 0 || f.Buffering || e <= f.Epoch {
		return false
	}
	*f = Flow{Owner: to, Epoch: e, Nonce: f.Nonce}
	return true
}

// Expire ends holding, at its deadline. The destination may still come: the source, whatever has become of it, does nothing
// before it has reclaimed the session.
func (f *Flow) Expire() { f.Buffering = false }

// Lapse ends a move of which nobody has said anything for long: both sides must have died.
func (f *Flow) Lapse() {
	if f.To != 0 {
		f.Buffering, f.To, f.Epoch = false, 0, f.Epoch+2
	}
}

// In says whether a packet to a backend may pass.
func (f *Flow) In(backend Backend) bool { return backend == f.Owner && !f.Buffering }

// Out says whether a packet from a backend may pass, and notes that one has: what the owner before has is worth nothing then.
// While the session is to move, a reset comes from a backend on which the source has died, and does not pass.
func (f *Flow) Out(backend Backend, reset bool) bool {
	if backend != f.Owner || reset && f.To != 0 {
		return false
	}
	f.Predecessor = 0
	return true
}
