// SPDX-License-Identifier: Apache-2.0

package move

// Flow is a load balancer's record of a session. It is stored in the data path's map, and outlives the load
// balancer's agent.
type Flow struct {
	Owner       Backend
	Epoch       Epoch   // of Owner's ownership
	To          Backend // may acquire it in epoch Epoch+1; 0: none
	Buffering   bool    // packets to the owner are buffered
	Predecessor Backend // the previous owner, until Owner sends a packet: it can reclaim the session; 0: none
	Nonce       Nonce   // of this record; 0: the load balancer chose none
}

// farAhead bounds the number of epochs by which an owner can be ahead of a load balancer. The bound keeps a
// destination from exhausting a session's epochs.
const farAhead = 1 << 16

// Receive processes a backend's message and returns the answers. gone means the agent incarnation of the flow's
// latest Flip has ended.
func (f *Flow) Receive(from Backend, m Message, gone bool) (answers [2]Message) {
	switch m.Kind {
	case Buffer:
		// The owner may know moves that the load balancer has forgotten: the later epoch wins.
		ok := f.Owner == from && m.Epoch > f.Epoch && (!f.Buffering || f.To == m.Backend) && m.Backend != from && m.Backend != 0
		if ok {
			f.Buffering, f.To, f.Epoch = !m.OK, m.Backend, m.Epoch-1
		}
		answers[0] = Message{Kind: Buffered, To: AtSource, Epoch: m.Epoch, OK: ok}
	case Flip:
		ok := f.Owner == from && f.Epoch == m.Epoch // a repetition
		if !ok && f.To == from && m.Epoch == f.Epoch+1 {
			*f = Flow{Owner: from, Epoch: m.Epoch, Predecessor: f.Owner, Nonce: f.Nonce}
			ok = true
		}
		if !ok && f.Nonce != 0 && f.Owner != from && m.Epoch > f.Epoch && m.Epoch-f.Epoch < farAhead && (f.To == 0 || f.To == from) {
			// This Flip overtook its Buffer. The later Buffer is now rejected too. Otherwise it could succeed after
			// the destination has given up.
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
	case f.Owner == from && m.Epoch == f.Epoch+1 && f.To != 0: // buffering or not: a State under way is now too late
		f.Buffering, f.To, f.Epoch = false, 0, m.Epoch+1
	case f.Owner == from && m.Nonce == f.Nonce && m.Nonce != 0 && (m.Epoch > f.Epoch || m.Epoch == f.Epoch && f.To == 0):
		// No Buffer arrived in time, and a later one is rejected.
		f.Buffering, f.To, f.Epoch = false, 0, m.Epoch+1
	case f.Owner == from && m.Epoch < f.Epoch: // returned already: no Flip of that move is accepted any more
	case f.Owner != from && f.Predecessor == from && f.Epoch == m.Epoch && gone:
		*f = Flow{Owner: from, Epoch: m.Epoch + 1, Nonce: f.Nonce}
		answers[1] = Message{Kind: Revoked, To: AtDestination, Epoch: f.Epoch, Move: m.Epoch}
	default: // moved for good; or the move is unknown here, and the source knows whether it has sent a State
		if f.Predecessor == from && f.Epoch == m.Epoch { // a late message of an earlier move does not concern this copy
			f.Predecessor = 0
		}
		return answers
	}
	answers[0].OK, answers[0].Epoch = true, f.Epoch
	return answers
}

// Left processes a backend's report that a session has moved from it to another backend, in an epoch. It applies to a
// forgotten flow with a new record, made by a packet routed by the hash. Left reports whether it changed the flow.
func (f *Flow) Left(from, to Backend, e Epoch) bool {
	if f.Owner != from || to == 0 || to == from || f.To != 0 || f.Buffering || e <= f.Epoch {
		return false
	}
	*f = Flow{Owner: to, Epoch: e, Nonce: f.Nonce}
	return true
}

// Expire ends buffering at its deadline. The destination can still acquire the session. The source does nothing
// before it has reclaimed the session.
func (f *Flow) Expire() { f.Buffering = false }

// Lapse ends a move without messages for a long time: both sides must have died.
func (f *Flow) Lapse() {
	if f.To != 0 {
		f.Buffering, f.To, f.Epoch = false, 0, f.Epoch+2
	}
}

// In reports whether a packet to a backend may pass.
func (f *Flow) In(backend Backend) bool { return backend == f.Owner && !f.Buffering }

// Out reports whether a packet from a backend may pass. A passing packet makes the previous owner's copy stale. An
// RST during a move means the source's process has died: it does not pass.
func (f *Flow) Out(backend Backend, reset bool) bool {
	if backend != f.Owner || reset && f.To != 0 {
		return false
	}
	f.Predecessor = 0
	return true
}
