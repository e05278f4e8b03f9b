/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Longest-prefix match over IPv4 and IPv6, mostly in one cold pair of cache lines. Package table
 * writes this data; table/README.md describes the structure. A program defines a table by
 *
 *	TABLE_MAPS(flows)
 *	...
 *	value = TABLE_LOOKUP4(flows, bpf_ntohl(ip->saddr));
 *	value = TABLE_LOOKUP6(flows, words); // __u32 words[4], each in host byte order
 *
 * A value is 1 to TABLE_MAX_VALUE. 0 means no prefix covers the address. A reader sees the table
 * before or after a change, never in between.
 */
#ifndef WEIR_TABLE_H
#define WEIR_TABLE_H

#define TABLE_MAX_VALUE 0x3fffff
#define TABLE_ROOT4	17  /* bits of an IPv4 address selecting a page */
#define TABLE_ROOT6	16  /* bits of an IPv6 address selecting a page, if its /32 has none */
#define TABLE_SLOTS	18  /* bits of the hash of /32s; others are found through root6 */
#define TABLE_BUCKETS	17  /* bits of its displacements */
#define TABLE_SEGMENT	20  /* bits of a segment of pages: 1 MiB */
#define TABLE_SLACK	256 /* bytes behind a segment, so reading past a short page is legal */

/*
 * entry, everywhere: with bit 31 set, bits 30 to 9 are the number of a page, in units of 8 bytes.
 * Otherwise they are the value. In the index, bits 1 and 0 are the number of further cache lines of
 * the page. In a page, bits 8 to 5 are the number of wildcard bits within its 16. Bits 4 to 0 are
 * the distance, in items, back to the enclosing item; 0 means none.
 */
#define TABLE_PAGE	0x80000000u
#define TABLE_OF(entry) (((entry) >> 9) & TABLE_MAX_VALUE)
#define TABLE_LINES	3

/*
 * A page has 8 to 176 bytes and spans as few cache lines as possible:
 *
 *	__u32 head	bit 31 0; 30 to 9 the value if no item matches; 8 this value is a prefix
 *			itself and not inherited; 7 to 5 the examined 16 bits of the address,
 *			0: the last bits of an IPv4 address; 4 to
 *			0 n, or TABLE_LIST or TABLE_FAN
 *	__u32 tag	the first 32 bits of the addresses below it (IPv6)
 *	__u64 starts[]	n sorted 16-bit lanes: the first address of each item; ones up to 8 bytes
 *	__u32 entry[n]
 *
 * A fan has head, tag, the number of examined bits, a __u32 for the writer, and an entry for each
 * value of those bits.
 *
 * A list of prefixes of one /64 has head, their number in place of the tag, and for each { __u64
 * low bits; __u32 wildcard bits; __u32 value }, the longest first.
 */
#define TABLE_KIND	31
#define TABLE_LIST	30
#define TABLE_FAN	31
#define TABLE_MAX_ITEMS 28
#define TABLE_MAX_LIST	7

/* The maximum number of searched pages. Each examines at least one more bit, and the first may be
 * searched twice. Real tables need a few. */
#define TABLE_DEPTH4 (32 - TABLE_ROOT4 + 2)
#define TABLE_DEPTH6 (128 - TABLE_ROOT6 + 2)

/* index leads to the pages. There are two of them, so a table can be replaced at once. */
struct table_index {
	__u32 root4[1 << TABLE_ROOT4];
	__u32 root6[1 << TABLE_ROOT6];
	__u32 slot[1 << TABLE_SLOTS];
	__u16 displacement[1 << TABLE_BUCKETS];
	__u32 buckets; /* of displacement, in use */
	__u32 slots;   /* of slot */
};

struct table_segment {
	__u8 page[(1 << TABLE_SEGMENT) + TABLE_SLACK];
};

#define TABLE_SIZES 23	 /* of free pages, in units of 8 bytes: 1 to 22 */
#define TABLE_LIMBO 8192 /* pages removed from the table and possibly still read */

/* head: its first word selects the index to read, bit 0 for IPv4 and bit 1 for IPv6. Only the
 * writer uses the rest. */
struct table_head {
	__u32 active;
	__u32 magic;
	__u32 writing; /* not 0: a change is in progress, or its writer was killed */
	__u32 reused;  /* rises before page memory is reused */
	__u32 next;    /* the first never used unit of 8 bytes */
	__u32 units;   /* in use */
	__u32 pages;
	__u32 groups; /* /32s in the hash */
	__u32 count[2];
	__u32 in_limbo;
	__u32 free[TABLE_SIZES]; /* lists of free pages, by size */
	__u32 free_fan[17];	 /* and of fans, by their bits */
	__u32 limbo[TABLE_LIMBO];
	/* Prefixes too short for a page, per index: prefix b of length l is number 2^l + b. */
	__u32 short4[2][2 << TABLE_ROOT4];
	__u32 short6[2][2 << TABLE_ROOT6];
};

#define TABLE_HIGH 0x8000800080008000ULL
#define TABLE_ONES 0x0001000100010001ULL

/* table_page_at returns the address of a page. */
static __always_inline const __u8 *table_page_at(void *pages, __u32 number)
{
	__u32 segment = number >> (TABLE_SEGMENT - 3);
	struct table_segment *s = bpf_map_lookup_elem(pages, &segment);

	return s ? s->page + (number << 3 & ((1 << TABLE_SEGMENT) - 1)) : 0;
}

/* table_start returns an item's first address. */
static __always_inline __u32 table_start(const __u8 *p, __u32 i)
{
	__u32 lane = *(__u16 *)(p + 8 + 2 * i);

	return (lane << 1 | lane >> 15) & 0xffff;
}

/* table_lanes marks each lane of a page's j-th four starts not above the sought one. */
static __always_inline __u64 table_lanes(const __u8 *p, __u64 sought, __u32 j, __u32 k)
{
	__u64 lanes = *(__u64 *)(p + 8 + 8 * j) & ~TABLE_HIGH;
	__u64 there = (__u64)((__s64)((__s64)j - (__s64)k) >> 63);

	return ((sought - lanes) >> 15) & TABLE_ONES & there;
}

/*
 * table_search returns the entry of a page for an address. x is the page's 16 bits of the address.
 * The comparison uses 15 bits: each lane is rotated right by one, so its top bit is the lowest bit
 * of the start. The last test compares this bit. With again 1, the function returns entry itself in
 * one rare case: neither the found item nor its encloser covers the address, but an outer encloser
 * may. table_step then searches the page to the end. So the verifier does not walk that loop at
 * every use of a table.
 */
static __always_inline __u32 table_search(const __u8 *p, __u32 x, __u32 entry, int again)
{
	/* Fetch all cache lines of the page now, not one after the other. */
	__u32 lines = entry & TABLE_LINES;
	const __u8 *second = p + ((lines + 1) >> 1 << 6), *last = p + (lines << 6);
	__u32 head = *(__u32 *)p, n = head & TABLE_KIND;
	__u32 k = (n + 3) >> 2, i, j, e, miss, covered, back, fetched;
	__u64 sought = (__u64)(x >> 1) * TABLE_ONES | TABLE_HIGH, rank = 0;
	const __u8 *entries = p + 8 + 8 * k;

	asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(fetched) : "r"(second));
	asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(fetched) : "r"(last));
	/*
	 * Count the lanes not above x. Four are compared at a time, without a branch to mispredict,
	 * except for rarely large pages.
	 */
#pragma clang loop unroll(full)
	for (j = 0; j < 4; j++)
		rank += table_lanes(p, sought, j, k);
	if (k > 4) {
#pragma clang loop unroll(full)
		for (j = 4; j < TABLE_MAX_ITEMS / 4; j++)
			rank += table_lanes(p, sought, j, k);
	}
	i = (__u32)((rank * TABLE_ONES) >> 48) - 1;
	if (i >= n) { /* below the first item, or at the last two addresses */
		if (i >= TABLE_MAX_ITEMS || !n)
			return head;
		i = n - 1;
	}
	if (i >= TABLE_MAX_ITEMS)
		return head;
	e = *(__u32 *)(entries + 4 * i);
	miss = (x ^ table_start(p, i)) >> ((e >> 5) & 15);
	covered = (__u32)((__s32)(miss - 1) >> 31);
	asm volatile("" : "+r"(covered));
	back = e & 31 & ~covered;
	if (back) { /* not covered, but an item encloses it */
		if (again) {
			i = (i - back) & 31;
			if (i >= TABLE_MAX_ITEMS)
				return head;
			e = *(__u32 *)(entries + 4 * i);
			if (((x ^ table_start(p, i)) >> ((e >> 5) & 15)) == 0)
				return e;
			return e & 31 ? entry : head;
		}
		for (j = 0; j < TABLE_MAX_ITEMS; j++) {
			back = e & 31;
			i = (i - back) & 31;
			if (!back || i >= TABLE_MAX_ITEMS)
				return head;
			e = *(__u32 *)(entries + 4 * i);
			if (((x ^ table_start(p, i)) >> ((e >> 5) & 15)) == 0)
				return e;
		}
		return head;
	}
	return head ^ ((head ^ e) & covered);
}

/*
 * table_fan returns the entry of a fan for an address. A fan is an array indexed by the next bits
 * of the address. It replaces deeply nested pages. Its number of bits follows the tag, and its
 * entries begin at byte 16.
 */
static __always_inline __u32 table_fan(void *pages, __u32 entry, __u32 x, __u32 width)
{
	__u32 number = TABLE_OF(entry), segment = number >> (TABLE_SEGMENT - 3);
	__u32 at = number << 3 & ((1 << TABLE_SEGMENT) - 1), bits;
	struct table_segment *s = bpf_map_lookup_elem(pages, &segment);

	if (!s)
		return 0;
	bits = *(__u32 *)(s->page + at + 8);
	at = (at + 16 + 4 * (x >> ((width - bits) & 31))) & ((1 << TABLE_SEGMENT) - 1);
	return *(__u32 *)(s->page + at);
}

/* table_index_of returns the active index. */
static __always_inline struct table_index *table_index_of(void *head, void *index, __u32 family)
{
	__u32 zero = 0, which;
	struct table_head *h = bpf_map_lookup_elem(head, &zero);

	if (!h)
		return 0;
	which = h->active >> family & 1;
	return bpf_map_lookup_elem(index, &which);
}

/* table_first4 looks up an address (host byte order) in the index and the first page. */
static __always_inline __u32 table_first4(void *head, void *index, void *pages, __u32 ip)
{
	struct table_index *t = table_index_of(head, index, 0);
	const __u8 *p;
	__u32 entry;

	if (!t)
		return 0;
	entry = t->root4[ip >> (32 - TABLE_ROOT4)];
	if (!(entry & TABLE_PAGE))
		return entry;
	p = table_page_at(pages, TABLE_OF(entry));
	if (!p)
		return 0;
	ip &= (1 << (32 - TABLE_ROOT4)) - 1;
	if ((*(__u32 *)p & TABLE_KIND) == TABLE_FAN)
		return table_fan(pages, entry, ip, 32 - TABLE_ROOT4);
	return table_search(p, ip, entry, 1);
}

/* table_list searches the prefixes of one /64, the longest first. */
static __always_inline __u32 table_list(const __u8 *p, __u64 low)
{
	__u32 i, n = *(__u32 *)(p + 4);

	for (i = 0; i < TABLE_MAX_LIST && i < n; i++) {
		__u64 start = *(__u64 *)(p + 8 + 16 * i);
		__u32 wildcard = *(__u32 *)(p + 16 + 16 * i);

		if (((low ^ start) >> (wildcard & 63)) == 0)
			return *(__u32 *)(p + 20 + 16 * i);
	}
	return TABLE_OF(*(__u32 *)p);
}

/* table_step searches one more page, for an address in two halves (IPv4: the upper 32 bits). */
static __always_inline __u32 table_step(void *pages, __u32 entry, __u64 high, __u64 low)
{
	const __u8 *p = table_page_at(pages, TABLE_OF(entry));
	__u32 head, slice, x;

	if (!p)
		return 0;
	head = *(__u32 *)p;
	if ((head & TABLE_KIND) == TABLE_LIST)
		return table_list(p, low) << 9;
	slice = (head >> 5) & 7;
	if (slice)
		x = (slice & 4 ? low : high) >> (48 - 16 * (slice & 3)) & 0xffff;
	else
		x = high >> 32 & ((1 << (32 - TABLE_ROOT4)) - 1);
	if ((head & TABLE_KIND) == TABLE_FAN)
		return table_fan(pages, entry, x, slice ? 16 : 32 - TABLE_ROOT4);
	return table_search(p, x, 0, 0);
}

/* Two products spread a /32: bucket and step come from one, the slot from the other. A step is odd,
 * and large enough to reach every slot with some displacement. */
#define TABLE_HASH1 0x9E3779B97F4A7C15ULL
#define TABLE_HASH2 0xBF58476D1CE4E5B9ULL
#define TABLE_STEP  0x10001

/* table_first6 looks up an address of four words (host byte order) in the index. */
static __always_inline __u32 table_first6(void *head, void *index, void *pages, const __u32 *words)
{
	struct table_index *t = table_index_of(head, index, 1);
	__u32 entry, d;
	const __u8 *p;
	__u64 h;

	if (!t)
		return 0;
	h = words[0] * TABLE_HASH1;
	d = t->displacement[(h >> 32) * t->buckets >> 32 & ((1 << TABLE_BUCKETS) - 1)];
	d = (words[0] * TABLE_HASH2 >> 32) + d * ((__u32)h | TABLE_STEP);
	entry = t->slot[(__u64)d * t->slots >> 32 & ((1 << TABLE_SLOTS) - 1)];
	p = table_page_at(pages, TABLE_OF(entry));
	if (!p)
		return 0;
	if (*(__u32 *)(p + 4) == words[0] && entry) {
		if ((*(__u32 *)p & TABLE_KIND) == TABLE_FAN)
			return table_fan(pages, entry, words[1] >> 16, 16);
		return table_search(p, words[1] >> 16, entry, 1);
	}
	return t->root6[words[0] >> (32 - TABLE_ROOT6)];
}

/*
 * TABLE_MAPS declares a table. Set the number of segments before creating the maps (table.Size). A
 * step from page to page is a global function. The verifier then checks it once, not for each of
 * the up to hundred nested pages.
 */
#define TABLE_MAPS(name)                                                                          \
	struct {                                                                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                 \
		__uint(map_flags, BPF_F_MMAPABLE);                                                \
		__uint(max_entries, 1);                                                           \
		__type(key, __u32);                                                               \
		__type(value, struct table_head);                                                 \
	} name##_head SEC(".maps");                                                               \
	struct {                                                                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                 \
		__uint(map_flags, BPF_F_MMAPABLE);                                                \
		__uint(max_entries, 2);                                                           \
		__type(key, __u32);                                                               \
		__type(value, struct table_index);                                                \
	} name##_index SEC(".maps");                                                              \
	struct {                                                                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                 \
		__uint(map_flags, BPF_F_MMAPABLE);                                                \
		__uint(max_entries, 1);                                                           \
		__type(key, __u32);                                                               \
		__type(value, struct table_segment);                                              \
	} name##_pages SEC(".maps");                                                              \
	__attribute__((noinline)) __u32 name##_step(__u32 entry, __u64 high, __u64 low)           \
	{                                                                                         \
		return table_step(&name##_pages, entry, high, low);                               \
	}                                                                                         \
	static __always_inline __u32 name##_lookup4(__u32 ip)                                     \
	{                                                                                         \
		__u32 i, entry = table_first4(&name##_head, &name##_index, &name##_pages, ip);    \
                                                                                                  \
		for (i = 1; i < TABLE_DEPTH4 && entry & TABLE_PAGE; i++)                          \
			entry = name##_step(entry, (__u64)ip << 32, 0);                           \
		return TABLE_OF(entry);                                                           \
	}                                                                                         \
	static __always_inline __u32 name##_lookup6(const __u32 *words)                           \
	{                                                                                         \
		__u32 i, entry = table_first6(&name##_head, &name##_index, &name##_pages, words); \
                                                                                                  \
		for (i = 0; i < TABLE_DEPTH6 && entry & TABLE_PAGE; i++)                          \
			entry = name##_step(entry, (__u64)words[0] << 32 | words[1],              \
					    (__u64)words[2] << 32 | words[3]);                    \
		return TABLE_OF(entry);                                                           \
	}

/* TABLE_LOOKUP4 and TABLE_LOOKUP6 return the value of the longest prefix covering an address, or 0. */
#define TABLE_LOOKUP4(name, ip)	   name##_lookup4(ip)
#define TABLE_LOOKUP6(name, words) name##_lookup6(words)

#endif
