// SPDX-License-Identifier: Apache-2.0

// Package move decides who owns a TCP session while it moves from one backend to another. It is the protocol without its
// transport: what each side does at each message, so that the explorer (package explore) and the agents run the same code.
//
// Three take part. The source has the socket. The destination is to have it. The load balancer, which every packet of the session
// passes in both directions, lets one backend speak and be spoken to: the owner; whatever another backend sends for the flow it drops.
// So a socket that lives at both backends for a moment is no second owner, and one record at the load balancer, changed by one store,
// is where a session moves.
//
//	source            load balancer          destination
//	  Hold(e)    ──────▶ packets are held
//	stops packets, dumps the socket, and keeps it, stopped
//	          ◀────── Held(e)
//	  State(e)   ─────────────────────────▶ restores it, in repair
//	                      ◀────── Flip(e)
//	                  the owner is the destination
//	                  Flipped(e) ──────▶ the application gets it
//	  ◀──────────────────────── Done(e)
//	  Reclaim(e) ──────▶ it is gone, for good
//	closes its own without a word
//
// e is the epoch of the move: one more than the epoch in which the source owns the session. Whatever goes wrong, the source
// asks the load balancer before it does anything: Reclaim(e). If the session has not moved, the load balancer gives it back in epoch
// e+1, and a Flip(e) that comes later is refused. If it has moved and the destination has said a word to the client, the
// source's copy is worth nothing: it closes it. If it has moved, the destination's agent has died and the client has heard
// nothing from there, the load balancer gives it back as well.
//
// The source waits for Held(e) only where it does not know the birth of the load balancer's record. With it, it goes ahead: it says Hold(e)
// once, and sends State(e) at once. Then State(e) may be there although the load balancer knows of no move e: Hold(e) was lost with a
// connection, or is late, or is refused. A Flip(e) that comes first is refused for good: Hold(e), when it comes, is too late. A source
// that is told no to its one Hold(e) knows that nobody can have the session by this move. And to a Reclaim(e) that says the birth of its
// record a load balancer that has not heard Hold(e) in time answers yes: the record is as old as the source's knowledge of it, so it would
// know of a move e. Births are believed for a minute, from the life of the load balancer's agent that has said them: a source whose
// knowledge is older waits.
//
// Packets are held until a deadline at most; then they go to the source, which is deaf, and the client repeats them. Where they wait at
// the source instead (Source.Parks), the load balancer passes them to it until the owner is another.
//
// A load balancer may not know of a move: it refuses to hold a flow that it has forgotten (one that was silent for long, or for a
// reboot), or knows in a later epoch. To Reclaim(e) it then says in which later epoch the source owns the flow, else no: it gives back
// only what it was asked to hold, for a flow that was forgotten may have moved before. What no means the source knows: if it has sent no
// State(e), nobody else can have the session by this move, and it goes on in epoch e+1, so that nothing of epoch e that is late can be
// taken for another's; if it has, the destination may have the session, or have had it, and the source closes its copy: better none than
// two. A load balancer that is behind takes the owner's epoch from its next Hold.
//
// Six things are the agents' to hold, and the explorer counts on them:
//   - from Dump to Thaw or Close no packet reaches the source's socket, also while its agent is dead;
//   - while an agent is dead its sockets are kept for its next life, and no application is given one, however long that takes;
//   - from Restore to Deliver the destination's socket is in repair, so that it dies silently with those who have it; and from Restore
//     to the first packet that it sends, its backend sends neither reset nor end of the flow, for want of a socket or for its death;
//   - what is sent to the destination's agent is read by no later life of it, be it a State or an answer: the one that has died
//     may have owned the session already;
//   - the load balancer's Flow outlives its agent, and is not forgotten while it is to be held, or while a copy of the session is
//     stopped or has yet to speak, unless the session has ended: a machine that is lost in that moment may take the session with it;
//     (one that begins anew answers nothing about what it does not know, until both backends have told how they stand);
//   - the load balancer hears what a backend says in the order in which it was said, and nothing from a connection before.
//
// Messages may be lost, come twice and come late: each is harmless then, and Retry repeats what has had no answer. Only the Hold of a
// source that goes ahead must not come twice: it is said once, by a connection that delivers nothing twice, and after a Retry no source
// goes ahead.
package move
