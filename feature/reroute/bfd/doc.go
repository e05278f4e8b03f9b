// SPDX-License-Identifier: Apache-2.0

// Package bfd defines sessions of Bidirectional Forwarding Detection (RFC 5880, over UDP as in RFC 5881) with
// neighbours without weir: states, diagnostics and configuration. Package engine runs the sessions in the kernel.
package bfd
