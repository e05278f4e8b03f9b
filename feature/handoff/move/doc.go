// SPDX-License-Identifier: Apache-2.0

// Package move decides the owner of a TCP session while it moves between backends. It is the protocol without a
// transport: each side's reaction to each message. The explorer (package explore) and the agents run the same code.
//
// A move has three parties. The source has the socket. The destination receives it. Every packet of the session
// passes the load balancer, in both directions. The load balancer forwards packets to and from one backend only: the
// owner. It drops packets of other backends for the flow. A session therefore has one owner even while both backends
// have a socket. It moves by one store to one record at the load balancer.
//
//	source            load balancer          destination
//	  Buffer(e)   ──────▶ buffers packets
//	blocks packets, dumps the socket, and keeps it, stopped
//	          ◀────── Buffered(e)
//	  State(e)   ─────────────────────────▶ restores it, in repair mode
//	                      ◀────── Flip(e)
//	                  the owner is the destination
//	                  Flipped(e) ──────▶ delivers it to the application
//	  ◀──────────────────────── Done(e)
//	  Reclaim(e) ──────▶ no: it has moved for good
//	closes its copy silently
//
// e is the epoch of the move: the source's epoch plus one. After any failure the source first sends Reclaim(e) to the
// load balancer. There are three cases:
//   - The session has not moved: the load balancer returns it in epoch e+1, and rejects a later Flip(e).
//   - It has moved, and the destination has sent a packet to the client: the source's copy is stale, and the source
//     closes it.
//   - It has moved, the destination's agent has died, and the destination has sent nothing to the client: the load
//     balancer returns it in epoch e+1.
//
// A source without the nonce of the load balancer's record waits for Buffered(e). A source with the nonce goes ahead:
// it sends Buffer(e) once, and State(e) at once. State(e) can then arrive before the load balancer has processed
// Buffer(e), because Buffer(e) is late, rejected, or lost with its connection. Three rules cover this:
//   - A Flip(e) before Buffer(e) is rejected for good, and so is the later Buffer(e).
//   - If the only Buffer(e) is rejected, no destination can acquire the session in epoch e.
//   - A Reclaim(e) with the record's nonce succeeds if no Buffer(e) has arrived. The record is as old as the source's
//     knowledge of it, and would contain a move e.
//
// A nonce is valid for one minute, and only from the current incarnation of the load balancer's agent. A source with
// an older nonce waits.
//
// The load balancer buffers packets up to a deadline. It then forwards them to the source. The source's socket is
// stopped, so the client retransmits them. If the source buffers the packets itself (Source.Parks), the load balancer
// forwards packets to it until the owner changes.
//
// A load balancer may lack the record of a move. It rejects Buffer for a forgotten flow (after long silence, or a
// reboot) and for an older epoch. It answers Reclaim(e) with the source's later epoch if it has one, and with no
// otherwise. It returns only sessions with an accepted Buffer, because a forgotten flow may have moved before. On a
// no, the source decides:
//   - Without a sent State(e), no other backend can acquire the session by this move. The source continues in epoch
//     e+1, so late messages of epoch e match no other move.
//   - With a sent State(e), the destination may have the session, or may have had it. The source closes its copy: no
//     copy is better than two.
//
// A load balancer with an older epoch adopts the owner's epoch from its next Buffer.
//
// The agents guarantee six properties, and the explorer relies on them:
//   - From Dump to Thaw or Close no packet reaches the source's socket, even while its agent is dead.
//   - The sockets of a dead agent are kept for its next incarnation. No application receives one before, however long
//     that takes.
//   - From Restore to Deliver the destination's socket is in repair mode, and dies silently with its holders. From
//     Restore to the socket's first packet, the destination's backend sends neither RST nor FIN for the flow.
//   - An incarnation of the destination's agent reads no State and no answer addressed to an earlier one. The earlier
//     one may have owned the session already.
//   - The load balancer's Flow outlives its agent. It is not forgotten while packets are buffered, nor while a copy
//     of the session is stopped or has not sent a packet. An ended session may be forgotten. (Losing a machine in this
//     moment may lose the session. A new load balancer answers nothing about unknown flows until both backends have
//     reported theirs.)
//   - The load balancer processes a backend's messages in the order of their sending, and none of an earlier
//     connection.
//
// Loss, repetition and delay of messages are harmless. Retry repeats unanswered messages. The one exception is the
// Buffer of a source that goes ahead. It must not arrive twice: it is sent once, on a connection without duplicates,
// and no source goes ahead after a Retry.
package move
