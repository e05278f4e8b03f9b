// SPDX-License-Identifier: Apache-2.0

// Package bfd is Bidirectional Forwarding Detection (RFC 5880, over UDP as in RFC 5881) for neighbours that know nothing of
// weir: control packets and their authentication, and the state machine of a session. It neither sends nor listens: whoever runs
// a session has the kernel send what Session says, at its interval, and judge by its detection time, and tells the session what
// has come. So nothing in here reads a clock.
package bfd
