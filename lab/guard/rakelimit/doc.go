// SPDX-License-Identifier: Apache-2.0

// Package rakelimit is the limiter compared with weir's guard: Rakelimit, published by Cloudflare
// (repository cloudflare/rakelimit, and "Building Rakelimit" in their blog). No registry offers it, so this
// is a new implementation of the publication. The algorithm and its numbers are the original's, the code is
// not.
//
// These parts are the original's:
//   - Twelve generalisations of a packet: source address (host, /24 or /48, any), source port (given or
//     any), destination port (given or any), always with the destination address. They form five levels, by
//     the number of omitted fields.
//   - For each a count-min sketch of 2 rows × 512 columns. A cell is a rate and the time of its last
//     packet. The rate is an exponentially weighted moving average of 1/gap, in whole packets per second.
//     The weight of a gap is its share of 2^27 ns (134 ms). A gap of this length or more forgets the rate.
//   - The first level with a rate above the limit decides: the packet passes with probability limit/rate,
//     and more general levels do not count it.
//   - Hashes with fixed seeds (fasthash for one row, lookup3 for the other), updates without atomic
//     operations.
//   - A filter of one socket, one program a family. It reads ports, and over IPv6 addresses, at offsets
//     counted from a network header. In the filter of a UDP socket the packet begins with the UDP header.
//
// One part differs: fields are hashed in another byte order, so other sources collide than in the original.
package rakelimit
