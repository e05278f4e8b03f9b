// SPDX-License-Identifier: Apache-2.0

// Package rakelimit is the limiter that weir's guard is compared with: Rakelimit, which Cloudflare published (repository
// cloudflare/rakelimit, and "Building Rakelimit" in their blog). It cannot be had from a registry, so it is written anew
// here from what is published of it: the algorithm and its numbers are the original's, the code is not.
//
// What is the original's:
//   - Twelve generalisations of a packet: source address (host, /24 or /48, any), source port (given or any),
//     destination port (given or any), always with the destination address; in five levels, by how much they leave out.
//   - For each a count-min sketch of 2 rows × 512 columns. A cell is a rate and the time of its last packet; the rate
//     is an exponentially weighted moving average of 1/gap, a gap's weight being its share of 2^27 ns (134 ms), in
//     whole packets per second. A gap as long as that forgets the rate.
//   - The first level in which a rate exceeds the limit decides: the packet passes with probability limit/rate, and
//     more general levels are not told of it.
//   - Hashes with fixed seeds (fasthash for one row, lookup3 for the other), updates without atomic operations.
//   - A filter of one socket, one program a family, that finds ports, and over IPv6 addresses, at offsets that hold
//     where the packet begins with its network header. For a UDP socket's filter it begins with the UDP header.
//
// What is not: the hash of a field is that of its bytes in another order, so other sources collide than in the original.
package rakelimit
