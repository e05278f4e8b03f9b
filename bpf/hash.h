/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Jenkins' lookup3 over an array of 32-bit words, as in include/linux/jhash.h. User space and all
 * programs hash an address to the same bucket. The Go version is internal/jhash.
 */
#ifndef WEIR_HASH_H
#define WEIR_HASH_H

#define WEIR_JHASH_INITVAL 0xdeadbeef

static __always_inline __u32 weir_rol32(__u32 word, int shift)
{
	return (word << shift) | (word >> (32 - shift));
}

/* weir_hash_addr hashes the 16 bytes of an address, taken as four words in memory order. */
static __always_inline __u32 weir_hash_addr(const __u32 *k, __u32 seed)
{
	__u32 a, b, c;

	a = b = c = WEIR_JHASH_INITVAL + (4 << 2) + seed;
	a += k[0];
	b += k[1];
	c += k[2];
	/* __jhash_mix */
	a -= c;
	a ^= weir_rol32(c, 4);
	c += b;
	b -= a;
	b ^= weir_rol32(a, 6);
	a += c;
	c -= b;
	c ^= weir_rol32(b, 8);
	b += a;
	a -= c;
	a ^= weir_rol32(c, 16);
	c += b;
	b -= a;
	b ^= weir_rol32(a, 19);
	a += c;
	c -= b;
	c ^= weir_rol32(b, 4);
	b += a;
	a += k[3];
	/* __jhash_final */
	c ^= b;
	c -= weir_rol32(b, 14);
	a ^= c;
	a -= weir_rol32(c, 11);
	b ^= a;
	b -= weir_rol32(a, 25);
	c ^= b;
	c -= weir_rol32(b, 16);
	a ^= c;
	a -= weir_rol32(c, 4);
	b ^= a;
	b -= weir_rol32(a, 14);
	c ^= b;
	c -= weir_rol32(b, 24);
	return c;
}

#endif
