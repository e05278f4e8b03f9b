/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Column of a sketch's row for a packet, by the remaining fields of a generalisation. */
#ifndef WEIR_RAKELIMIT_FIELDS_H
#define WEIR_RAKELIMIT_FIELDS_H

#include "hash.h"

#define COLUMNS 512

/* Fixed and public, like the original's: with them an attacker can choose colliding sources. */
#define FAST_SEED    0x2d31e867ULL
#define JENKINS_SEED 0x6ad611c3U

static __always_inline __u64 fast_mix(__u64 h)
{
	h ^= h >> 23;
	h *= 0x2127599bf4325c37ULL;
	return h ^ h >> 47;
}

/* fasthash64 of one or two words; len is the number of used bytes. */
static __always_inline __u64 fast(__u64 first, __u64 second, __u64 len)
{
	const __u64 m = 0x880355f21e6d1965ULL;
	__u64 h = FAST_SEED ^ len * m;

	h = (h ^ fast_mix(first)) * m;
	if (len > 8)
		h = (h ^ fast_mix(second)) * m;
	return fast_mix(h);
}

/* The last round of lookup3, for up to two words. */
static __always_inline __u32 jenkins(__u32 first, __u32 second, __u32 len)
{
	__u32 a, b, c;

	a = b = c = WEIR_JHASH_INITVAL + len + JENKINS_SEED;
	a += first;
	b += second;
	c = (c ^ b) - weir_rol32(b, 14);
	a = (a ^ c) - weir_rol32(c, 11);
	b = (b ^ a) - weir_rol32(a, 25);
	c = (c ^ b) - weir_rol32(b, 16);
	a = (a ^ c) - weir_rol32(c, 4);
	b = (b ^ a) - weir_rol32(a, 14);
	return (c ^ b) - weir_rol32(b, 24);
}

/* Generalisation of a source. */
enum { HOST, NET, ANY };
enum { EXACT, ANY_PORT };

/* The hashes of a packet's fields, for each row of a sketch. */
struct fields {
	__u64 source[ANY][2]; /* host; /24 or /48 */
	__u64 destination[2];
	__u64 source_port[2];
	__u64 destination_port[2];
};

static __always_inline void hash_ports(struct fields *f, __u32 source, __u32 destination)
{
	f->source_port[0] = fast(source, 0, 2);
	f->source_port[1] = jenkins(source, 0, 2);
	f->destination_port[0] = fast(destination, 0, 2);
	f->destination_port[1] = jenkins(destination, 0, 2);
}

static __always_inline void hash_ipv4(struct fields *f, __u32 source, __u32 destination)
{
	f->source[HOST][0] = fast(source, 0, 4);
	f->source[HOST][1] = jenkins(source, 0, 4);
	f->source[NET][0] = fast(source & 0xffffff00, 0, 4);
	f->source[NET][1] = jenkins(source & 0xffffff00, 0, 4);
	f->destination[0] = fast(destination, 0, 4);
	f->destination[1] = jenkins(destination, 0, 4);
}

static __always_inline void hash_ipv6(struct fields *f, const __u32 *source,
				      const __u32 *destination)
{
	__u64 high = (__u64)source[0] << 32 | source[1], low = (__u64)source[2] << 32 | source[3];
	__u32 third = source[1] & bpf_htonl(0xffff0000);

	f->source[HOST][0] = fast(high, low, 16);
	f->source[HOST][1] = weir_hash_addr(source, JENKINS_SEED);
	f->source[NET][0] = fast((__u64)source[0] << 32 | third, 0, 6);
	f->source[NET][1] = jenkins(source[0], third, 6);
	f->destination[0] = fast((__u64)destination[0] << 32 | destination[1],
				 (__u64)destination[2] << 32 | destination[3], 16);
	f->destination[1] = weir_hash_addr(destination, JENKINS_SEED);
}

static __always_inline __u64 combine(__u64 h, __u64 field)
{
	return h ^ (field + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2));
}

static __always_inline __u32 column(const struct fields *f, int row, int source, int source_port,
				    int destination_port)
{
	__u64 h = 0;

	if (source != ANY)
		h = combine(h, f->source[source][row]);
	h = combine(h, f->destination[row]);
	if (source_port != ANY_PORT)
		h = combine(h, f->source_port[row]);
	if (destination_port != ANY_PORT)
		h = combine(h, f->destination_port[row]);
	return (__u32)(h - (h >> 32)) % COLUMNS;
}

#endif
