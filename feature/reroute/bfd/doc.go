// SPDX-License-Identifier: Apache-2.0

// Package bfd is Bidirectional Forwarding Detection (RFC 5880, over UDP as in RFC 5881) for neighbours that know nothing of
// weir: states, diagnostics and the configuration of a session. Package engine has the kernel run sessions.
package bfd
