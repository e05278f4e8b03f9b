// SPDX-License-Identifier: Apache-2.0

// Package protect is the data path of reroute: it sends what the kernel routes to a link that may not be used another way,
// by segment routing over IPv6 (RFC 8986) or straight to another neighbour. Who judges a link sets a byte of its word (package
// links); the programs read the word with each packet. Routes stay the operator's: nothing here changes one, and copies of those that go with
// a carrier stand in tables of weir's own.
package protect
