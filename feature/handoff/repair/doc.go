// SPDX-License-Identifier: Apache-2.0

// Package repair takes a live TCP connection out of one kernel and puts it into
// another, with TCP_REPAIR (tcp(7) does not tell of it; net/ipv4/tcp.c does). The
// peer sees neither FIN nor RST, and every byte once.
//
// The order, which only the caller can keep:
//
//  1. Stop the connection's packets, where they come in: a socket under repair
//     still takes data and acknowledges it. [DumpOptions.Stop] is the place for it.
//  2. [Dump]. The socket is now frozen. [Resume] would let it go on here.
//  3. Close the descriptor: silently, since it is frozen. From here on the state is
//     all there is of the session, and packets that still come draw a RST.
//  4. Carry the state over ([State.AppendBinary], [Parse]).
//  5. [Build] there, in the service address's network namespace, then
//     [Built.Start]; or both by [Restore].
//  6. Let the packets in again.
//
// Nobody else may read from or write to the socket from step 2 on: it refuses
// (EPERM), and Go's descriptors have readers of their own.
//
// # What moves
//
// Sequence numbers, what was sent but not acknowledged, what was not sent, what was
// not read (as bytes for the application, see [State.Unread]), MSS, window scales,
// SACK, timestamps with their clock, the windows, the congestion control by name,
// the sizes of buffers and whether they grow by themselves, socket options (those of
// [State.Options]), either direction's end. IPv4, IPv6 and IPv4 on an IPv6 socket.
//
// # TLS in the kernel
//
// A session whose records the kernel encrypts or decrypts (kTLS) moves with its keys, which [State] then holds: it is to
// be carried over like a private key. Under kTLS the queues cannot be read, so that it takes a moment in which they are
// empty: [Dump] waits for it a little ([DumpOptions.Quiet]), and refuses with [errTLSBusy] else. Whoever has the packets
// stopped before Dump calls [Quiesce] before that. A record that waits for more data (MSG_MORE) is sent at once. A session
// stays if one of its ends has ended, if its receive buffer is small, and if the kernel decrypts and is older than Linux
// 6.0: in the latter cases nobody can see what of a record has arrived ([errTLS]). That remains so under memory pressure
// of the whole system (tcp_mem, a cgroup's memory), in which every kernel takes half a record out of the queue where nobody can
// see it: a session that moves then ends with an error of TLS. Offload to a network card was not tried.
//
// # What does not
//
// The congestion window and the round trip time: both start anew. Segments that
// arrived out of order: the peer sends them again. ECN: the session goes on without,
// for there is no way to switch it on in a socket under repair. TCP_FASTOPEN has no
// meaning once a session lives. Socket filters, time stamping, busy polling, SO_RCVTIMEO
// and SO_SNDTIMEO. Urgent data that was sent and not yet acknowledged is sent again as
// ordinary data: the kernel does not tell of it.
// Keys of TCP-MD5 and TCP-AO are never told to anybody: TCP-AO is refused where
// the kernel can tell it (Linux 6.7), with TCP-MD5 the session would die, so that the
// caller must know.
//
// A session of which the peer has sent its FIN is rebuilt as one that reads nothing any
// more: the kernel has no way to mark a FIN as received. Reads give EOF as before; after
// its close it waits in FIN_WAIT2 for tcp_fin_timeout (60 s), which nobody sees.
//
// It needs CAP_NET_ADMIN over the network namespace, at both ends, and CAP_NET_RAW for [RestoreOptions.Probe].
package repair
