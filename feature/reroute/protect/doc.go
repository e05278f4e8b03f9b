// SPDX-License-Identifier: Apache-2.0

// Package protect is the data path of reroute. It redirects the packets of an unusable link by segment routing over
// IPv6 (RFC 8986), or straight to another neighbour.
//
// Liveness, carrier detection and the operator each set a byte of the link state (package links). The programs read
// the link state with each packet. The operator's routes are never changed. Copies of routes lost with a carrier are
// kept in separate tables.
package protect
