/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * SHA-1 (FIPS 180-4) of an authenticated control packet. Its 52 bytes and the padding are one block
 * of 64.
 */
#ifndef WEIR_BFD_SHA1_H
#define WEIR_BFD_SHA1_H

#define SHA1_WORDS  16
#define SHA1_DIGEST 5 /* words */

#define SHA1_ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))

/*
 * sha1_block hashes w to digest and overwrites w. Words are in host byte order. The loop stays
 * rolled, because unrolled code overflows the stack.
 */
static __noinline int sha1_block(__u32 *w, __u32 *digest)
{
	__u32 a = 0x67452301, b = 0xefcdab89, c = 0x98badcfe, d = 0x10325476, e = 0xc3d2e1f0;
	__u32 f, k, next;
	int i;

	if (!w || !digest)
		return -1;
#pragma clang loop unroll(disable)
	for (i = 0; i < 80; i++) {
		if (i >= 16) {
			next = w[(i + 13) & 15] ^ w[(i + 8) & 15] ^ w[(i + 2) & 15] ^ w[i & 15];
			w[i & 15] = SHA1_ROTATE(next, 1);
		}
		if (i < 20)
			f = (b & c) | (~b & d), k = 0x5a827999;
		else if (i < 40)
			f = b ^ c ^ d, k = 0x6ed9eba1;
		else if (i < 60)
			f = (b & c) | (b & d) | (c & d), k = 0x8f1bbcdc;
		else
			f = b ^ c ^ d, k = 0xca62c1d6;
		next = SHA1_ROTATE(a, 5) + f + e + k + w[i & 15];
		e = d;
		d = c;
		c = SHA1_ROTATE(b, 30);
		b = a;
		a = next;
	}
	digest[0] = a + 0x67452301;
	digest[1] = b + 0xefcdab89;
	digest[2] = c + 0x98badcfe;
	digest[3] = d + 0x10325476;
	digest[4] = e + 0xc3d2e1f0;
	return 0;
}

#endif
