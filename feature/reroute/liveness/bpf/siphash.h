/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * SipHash-1-3 (Aumasson and Bernstein, 2012; the variant for hash tables) of a message of whole
 * words, in constant time. A probe and its answer need four.
 */
#ifndef WEIR_SIPHASH_H
#define WEIR_SIPHASH_H

#define SIP_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))

#define SIP_ROUND                      \
	do {                           \
		v0 += v1;              \
		v2 += v3;              \
		v1 = SIP_ROTL(v1, 13); \
		v3 = SIP_ROTL(v3, 16); \
		v1 ^= v0;              \
		v3 ^= v2;              \
		v0 = SIP_ROTL(v0, 32); \
		v2 += v1;              \
		v0 += v3;              \
		v1 = SIP_ROTL(v1, 17); \
		v3 = SIP_ROTL(v3, 21); \
		v1 ^= v2;              \
		v3 ^= v0;              \
		v2 = SIP_ROTL(v2, 32); \
	} while (0)

#define SIP_WORDS 7 /* the first words */
#define SIP_LAST  2 /* the last words, stored elsewhere */

/*
 * weir_siphash reads the words in memory order, little-endian as defined. They may be in a packet.
 * The loop stays rolled: unrolled code is no faster and takes four kilobytes.
 */
static __noinline __u64 weir_siphash(const __u64 *key, const __u64 *words, const __u64 *last)
{
	__u64 v0, v1, v2, v3, m;
	int i;

	if (!key || !words || !last)
		return 0;
	v0 = key[0] ^ 0x736f6d6570736575ULL;
	v1 = key[1] ^ 0x646f72616e646f6dULL;
	v2 = key[0] ^ 0x6c7967656e657261ULL;
	v3 = key[1] ^ 0x7465646279746573ULL;
#pragma clang loop unroll(disable)
	for (i = 0; i < SIP_WORDS; i++) {
		m = words[i];
		v3 ^= m;
		SIP_ROUND;
		v0 ^= m;
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < SIP_LAST; i++) {
		m = last[i];
		v3 ^= m;
		SIP_ROUND;
		v0 ^= m;
	}
	m = (__u64)((SIP_WORDS + SIP_LAST) * 8) << 56;
	v3 ^= m;
	SIP_ROUND;
	v0 ^= m;
	v2 ^= 0xff;
#pragma clang loop unroll(disable)
	for (i = 0; i < 3; i++)
		SIP_ROUND;
	return v0 ^ v1 ^ v2 ^ v3;
}

#endif
