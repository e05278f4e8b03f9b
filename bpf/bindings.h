/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Longest-prefix match with exact fields: prefixes are bound for a protocol and a port, or for
 * every port of a protocol. The longest prefix bound for the packet's protocol and port decides.
 * Within one prefix, a binding of the port precedes a binding of every port. A longer prefix bound
 * for something else hides nothing.
 *
 *	BINDINGS_MAPS(dispatch)
 *	...
 *	bound = BINDINGS_LOOKUP4(dispatch, bpf_ntohl(ip->daddr), IPPROTO_UDP, port);
 *	bound = BINDINGS_LOOKUP6(dispatch, words, IPPROTO_TCP, port); // words in host byte order
 *	if (bound)
 *		value = BINDINGS_VALUE(bound), length = BINDINGS_LENGTH(bound);
 *
 * The table's value of a prefix (table.h) is the number of its set. A set contains the bindings of
 * the prefix and the number of the enclosing prefix's set. table/bindings.go writes this data.
 */
#ifndef WEIR_BINDINGS_H
#define WEIR_BINDINGS_H

#include "table.h"

#define BINDINGS_MAX_VALUE 0xffffff
#define BINDINGS_INLINE	   15 /* bindings in a set's run, besides the first */
#define BINDINGS_UNIT	   4  /* bits of a memory unit of sets: 16 bytes */

/*
 * entry of a binding: bit 63 set; 55 to 40 the port, 0 for every port; 39 to 32 the protocol; 23 to
 * 0 the value. 0: none.
 */
#define BINDINGS_KEY(proto, port) (1ULL << 31 | (__u64)(__u16)(port) << 8 | (__u8)(proto))

struct bindings_set {
	/*
	 * Bit 30: a shared set. Several prefixes of the same length, with the same encloser and
	 * nothing below them, have equal bindings. 29 to 22 the prefix's length; 21 to 0 the set
	 * enclosing this one, or 0.
	 */
	__u32 link;
	/*
	 * Bit 31: the others are in the hash, and the rest is their number. Else 25 to 22 are their
	 * number, and 21 to 0 the first unit of their entries.
	 */
	__u32 more;
	__u64 first; /* entry */
};

#define BINDINGS_HASHED 0x80000000u

struct bindings_key {
	__u32 set;
	__u16 port; /* host byte order */
	__u8 proto;
	__u8 pad;
};

/* Beginning of the memory of sets, for the writer only. */
#define BINDINGS_LIMBO 8192
struct bindings_head {
	__u32 magic;
	__u32 writing; /* not 0: a change is in progress, or its writer was killed */
	__u32 reused;  /* rises before memory is reused */
	__u32 next;    /* the first never used unit */
	__u32 bindings;
	__u32 sets;
	__u32 hashed; /* bindings in the hash */
	__u32 in_limbo;
	__u32 free[9]; /* lists of free memory, by number of units */
	__u32 limbo[BINDINGS_LIMBO];
};

static __always_inline void *bindings_at(void *sets, __u32 number)
{
	__u32 segment = number >> (TABLE_SEGMENT - BINDINGS_UNIT);
	struct table_segment *s = bpf_map_lookup_elem(sets, &segment);

	return s ? s->page + (number << BINDINGS_UNIT & ((1 << TABLE_SEGMENT) - 1)) : 0;
}

#define BINDINGS_READ(x) (*(volatile typeof(x) *)&(x))

/* bindings_entry returns the entry of a set for a protocol and port, or 0. first and more are the
 * set's words. */
static __always_inline __u64 bindings_entry(void *sets, void *many, __u32 number, __u64 first,
					    __u32 more, __u32 proto, __u32 port)
{
	__u64 exact = BINDINGS_KEY(proto, port), any = BINDINGS_KEY(proto, 0), e, found = 0;
	__u32 i, n = more >> 22;
	const __u8 *run;

	if (first >> 32 == exact)
		return first;
	if (first >> 32 == any)
		found = first;
	if (!more)
		return found;
	if (more & BINDINGS_HASHED) {
		struct bindings_key key = { .set = number, .port = port, .proto = proto };
		__u32 *v = bpf_map_lookup_elem(many, &key);

		if (!v && !found) {
			key.port = 0;
			v = bpf_map_lookup_elem(many, &key);
		}
		return v ? 1ULL << 63 | *v : found;
	}
	run = bindings_at(sets, more & TABLE_MAX_VALUE);
	if (!run)
		return found;
	for (i = 0; i < BINDINGS_INLINE && i < n; i++) {
		e = *(__u64 *)(run + 8 * i);
		if (e >> 32 == exact)
			return e;
		if (e >> 32 == any)
			found = e;
	}
	return found;
}

/*
 * bindings_match looks up a protocol and port in a set. If bound, it returns the entry's value and
 * the length of the prefix with bit 63 set. Otherwise it returns the set to search next. The two
 * words of a set change one after the other, so a reader of a mixed state reads again.
 */
static __always_inline __u64 bindings_match(void *sets, void *many, __u32 number, __u32 proto,
					    __u32 port)
{
	struct bindings_set *s = bindings_at(sets, number);
	__u64 first, e = 0;
	__u32 more, i;

	if (!s)
		return 0;
	for (i = 0; i < 3; i++) {
		first = BINDINGS_READ(s->first);
		more = BINDINGS_READ(s->more);
		e = bindings_entry(sets, many, number, first, more, proto, port);
		if (BINDINGS_READ(s->first) == first && BINDINGS_READ(s->more) == more)
			break;
	}
	if (!e)
		return BINDINGS_READ(s->link) & TABLE_MAX_VALUE;
	return 1ULL << 63 | (__u64)(s->link >> 22) << 32 | (e & BINDINGS_MAX_VALUE);
}

#define BINDINGS_VALUE(bound)  ((__u32)(bound)&BINDINGS_MAX_VALUE)
#define BINDINGS_LENGTH(bound) ((__u32)((bound) >> 32) & 0xff)

/*
 * BINDINGS_MAPS declares a table with exact fields. Call table.SizeBindings before creating the
 * maps. The lookup in one set is a global function. The verifier then checks it once, not for each
 * enclosing prefix.
 */
#define BINDINGS_MAPS(name)                                                                        \
	TABLE_MAPS(name)                                                                           \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                  \
		__uint(map_flags, BPF_F_MMAPABLE);                                                 \
		__uint(max_entries, 1);                                                            \
		__type(key, __u32);                                                                \
		__type(value, struct table_segment);                                               \
	} name##_sets SEC(".maps");                                                                \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_HASH);                                                   \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                              \
		__uint(max_entries, 1);                                                            \
		__type(key, struct bindings_key);                                                  \
		__type(value, __u32);                                                              \
	} name##_many SEC(".maps");                                                                \
	__attribute__((noinline)) __u64 name##_match(__u32 set, __u32 proto, __u32 port)           \
	{                                                                                          \
		return bindings_match(&name##_sets, &name##_many, set, proto, port);               \
	}                                                                                          \
	static __always_inline __u64 name##_climb(__u32 set, __u32 proto, __u32 port, __u32 depth) \
	{                                                                                          \
		__u64 bound;                                                                       \
		__u32 i;                                                                           \
                                                                                                   \
		for (i = 0; i < depth && set; i++) {                                               \
			bound = name##_match(set, proto, port);                                    \
			if (bound >> 63)                                                           \
				return bound;                                                      \
			set = bound;                                                               \
		}                                                                                  \
		return 0;                                                                          \
	}

#define BINDINGS_LOOKUP4(name, ip, proto, port) \
	name##_climb(TABLE_LOOKUP4(name, ip), proto, port, 33)
#define BINDINGS_LOOKUP6(name, words, proto, port) \
	name##_climb(TABLE_LOOKUP6(name, words), proto, port, 129)

#endif
