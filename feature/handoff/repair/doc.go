// SPDX-License-Identifier: Apache-2.0

// Package repair moves a live TCP connection from one kernel to another with TCP_REPAIR. tcp(7) does not document it;
// see net/ipv4/tcp.c. The peer sees neither FIN nor RST, and receives every byte once.
//
// The caller must keep this order:
//
//  1. Block the connection's packets at ingress: a socket in repair mode still accepts and acknowledges data.
//     [DumpOptions.Stop] is the hook for this.
//  2. Call [Dump]. The socket is then frozen. [Resume] would continue the session here.
//  3. Close the descriptor. A frozen socket closes silently. From here on the session exists only in the state, and a
//     packet that reaches this host draws an RST.
//  4. Transfer the state ([State.AppendBinary], [Parse]).
//  5. Call [Build] at the destination, in the service address's network namespace, then [Built.Start].
//  6. Unblock the packets.
//
// From step 2 on nobody else may read from or write to the socket. It returns EPERM, and package net's descriptors
// have readers of their own.
//
// # State included
//
//   - Sequence numbers, and the windows.
//   - Unacknowledged and unsent data, and unread data as bytes for the application (see [State.Unread]).
//   - MSS, window scales, SACK, and timestamps with their clock.
//   - The name of the congestion control.
//   - The sizes of buffers, and whether they grow automatically.
//   - The socket options of [State.Options].
//   - The end of either direction.
//
// Sessions may use IPv4, IPv6, or IPv4 on an IPv6 socket.
//
// # TLS in the kernel
//
// A kTLS session moves with its keys. [State] then contains them: treat it like a private key. The queues of a kTLS
// socket are unreadable, so they must be empty. [Dump] waits for this up to [DumpOptions.Quiet], and fails with
// [errTLSBusy] afterwards. A caller that blocks packets before Dump calls [Quiesce] before blocking. A record waiting
// for more data (MSG_MORE) is sent at once.
//
// A session cannot move if one of its directions has ended. If the kernel decrypts, it also needs Linux 6.0 and a
// receive buffer that is not small: otherwise partially received records are invisible ([errTLS]). Under
// memory pressure of the whole system (tcp_mem, or a cgroup's memory) they are invisible on every kernel. A session
// moved then fails with a TLS error. NIC offload is untested.
//
// # State not included
//
//   - The congestion window and the round-trip time start anew.
//   - Out-of-order segments: the peer retransmits them.
//   - ECN: it cannot be enabled on a socket in repair mode, so the session continues without it.
//   - TCP_FASTOPEN has no meaning for an established session.
//   - Socket filters, time stamping, busy polling, SO_RCVTIMEO and SO_SNDTIMEO.
//   - Unacknowledged urgent data is retransmitted as ordinary data: the kernel does not report it.
//   - TCP-MD5 and TCP-AO keys are not readable. TCP-AO is rejected if the kernel reports it (Linux 6.7). A session
//     with TCP-MD5 would die: the caller must know.
//
// After the peer's FIN, the rebuilt session has its receive direction shut down, because the kernel cannot mark a FIN
// as received. Reads return EOF as before. After its close it waits in FIN_WAIT2 for tcp_fin_timeout (60 s), without
// visible effect.
//
// It requires CAP_NET_ADMIN over the network namespace, at both ends, and CAP_NET_RAW for [RestoreOptions.Probe].
package repair
