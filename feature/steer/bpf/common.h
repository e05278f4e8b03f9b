/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The common part of both engines: bucket, slot and on_empty. An engine includes this file after
 * these declarations:
 *
 *	steer_ctx		context of its program
 *	give(ctx, s, row, endpoint)
 *				assigns the slot's socket if the slot is complete: it has an
 *				admitted member and all required sockets. This is checked for
 *				every packet. The slot is thus withdrawn the moment a socket
 *				closes, without a process of weir. An incomplete member would
 *				split a router over two collectors
 *	swallow(ctx, s, p)	assigns a sink; 0 on success
 *	give_known(ctx, s, p, row, endpoint)
 *				assigns a datagram of a known peer to the previous generation
 *	give_before(ctx, s, row, endpoint)
 *				assigns the packet to the previous generation if it drains
 *	pass(ctx, at)		reports whether the kernel may choose; otherwise it may set
 *				another hash to choose a complete slot
 */
#ifndef WEIR_STEER_COMMON_H
#define WEIR_STEER_COMMON_H

struct inner_service {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct service));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct inner_service);
} steer_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS);
	__type(key, __u32);
	__type(value, struct slot);
} steer_slots SEC(".maps");

/* Makes clang emit the type written by user space. */
const struct service *steer_service_type __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS * 2);
	__type(key, __u32);
	__type(value, struct verdicts);
} steer_verdicts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, STEER_MAX_DEVICES);
	__type(key, struct device_key);
	__type(value, struct device);
} steer_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_ROWS * 2);
	__type(key, struct exit_key);
	__type(value, __u32); /* row */
} steer_exits SEC(".maps");

/* Devices moved by weir steer move. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_MOVED);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct device_key);
	__type(value, __u32); /* slot */
} steer_moved SEC(".maps");

struct inner_aliases {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, STEER_MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(key_size, sizeof(struct alias_key));
	__uint(value_size, sizeof(struct alias));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct inner_aliases);
} steer_aliases SEC(".maps");

/* by: packet. The next bucket, per CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__type(value, __u32);
} steer_turns SEC(".maps");

#define AF_INET	 2
#define AF_INET6 10

#ifndef barrier
#define barrier() asm volatile("" : : : "memory")
#endif
#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

/* packet is the input of the decision, read from the context once. */
struct packet {
	__u32 family;
	__u32 tcp; /* 1 for TCP, 0 for UDP */
	__u32 port;
	__u32 remote_port; /* network byte order; 0 unless needed by the policy */
	__u32 src[4]; /* IPv4 as v4-mapped: a device is the same for sockets of both families */
	__u32 dst[4];
};

/* place is a packet's slot, and the hash used by on_empty: next. */
struct place {
	__u32 slot;
	__u32 hash;
};

/* The result of an assignment. */
enum given {
	GIVEN = 0,
	NOT_WHOLE = 1, /* on_empty decides */
	REFUSED = 2,   /* rejected by the kernel */
};

static __always_inline enum given give(steer_ctx *ctx, struct service *s, __u32 row,
				       __u32 endpoint);
static __always_inline int swallow(steer_ctx *ctx, struct service *s, struct packet *p);
static __always_inline int give_known(steer_ctx *ctx, struct service *s, struct packet *p,
				      __u32 row, __u32 endpoint);
static __always_inline int give_before(steer_ctx *ctx, struct service *s, __u32 row,
				       __u32 endpoint);
static __always_inline int pass(steer_ctx *ctx, struct place *at);

/*
 * clock_of returns CLOCK_MONOTONIC in nanoseconds, to the precision of a tick, enough for "last
 * seen". The jiffies are one load. Reading the time, even the coarse clock, would cost as much as
 * choosing the slot.
 */
static __always_inline __u64 clock_of(struct service *s)
{
	__u64 ticks = bpf_jiffies64() * s->tick;

	if (!s->epoch)
		s->epoch = bpf_ktime_get_ns() - ticks;
	return ticks + s->epoch;
}

/* note_device records the times, counts and protocols of a source. */
static __always_inline void note_device(struct service *s, struct packet *p)
{
	struct device_key key = { .service = s->id };
	__u32 tcp = p->tcp & 1;
	struct device *d;
	__u64 now = clock_of(s);

	__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
	d = bpf_map_lookup_elem(&steer_devices, &key);
	if (!d) {
		struct device fresh = { .first = now, .window = now };

		bpf_map_update_elem(&steer_devices, &key, &fresh, BPF_NOEXIST);
		d = bpf_map_lookup_elem(&steer_devices, &key);
		if (!d)
			return;
	}
	d->last[tcp] = now;
	__sync_fetch_and_add(&d->packets[tcp], 1);
	/*
	 * Two CPUs may add, or close a window, at the same time. Then one rate is wrong, but never
	 * the number of packets.
	 */
	d->count++;
	if ((__s64)(now - d->window) > (__s64)STEER_RATE_WINDOW) {
		d->rate = d->count * 1000000000000ULL / (now - d->window);
		d->window = now;
		d->count = 0;
	}
}

static __always_inline struct verdicts *verdicts_of(__u32 row, __u32 tcp)
{
	__u32 key = row * 2 + (tcp & 1);

	return bpf_map_lookup_elem(&steer_verdicts, &key);
}

static __always_inline struct service *service_of(__u32 id)
{
	void *inner = bpf_map_lookup_elem(&steer_services, &id);
	__u32 zero = 0;

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

/* the_other returns (endpoint + i) modulo n, without a branch for the verifier to follow. */
static __always_inline __u32 the_other(__u32 endpoint, __u32 i, __u32 n)
{
	__u32 e = endpoint + i - n, below = (__u32)((__s32)e >> 31);

	barrier_var(below);
	return e + (n & below);
}

static __always_inline __u32 row_of(struct service *s, __u32 slot)
{
	return s->row[slot & (STEER_MAX_SLOTS - 1)];
}

/* resolve_alias replaces the source by the representative address of its device. */
static __always_inline void resolve_alias(struct service *s, struct packet *p)
{
	struct alias_key key = { .prefixlen = 128 };
	__u32 id = s->id;
	void *inner = bpf_map_lookup_elem(&steer_aliases, &id);
	struct alias *a;

	if (!inner)
		return;
	__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
	a = bpf_map_lookup_elem(inner, &key);
	if (a)
		__builtin_memcpy(p->src, a->addr, sizeof(p->src));
}

/* hash_flow hashes both addresses, both ports and the protocol. */
static __always_inline __u32 hash_flow(struct service *s, struct packet *p)
{
	return weir_hash_addr(p->dst, weir_hash_addr(p->src, s->seed) +
					      (p->remote_port << 16 | p->port) + p->tcp);
}

/* next_turn returns a number incremented for every packet of a service on this CPU. */
static __always_inline __u32 next_turn(struct service *s)
{
	__u32 id = s->id;
	__u32 *turn = bpf_map_lookup_elem(&steer_turns, &id);

	return turn ? (*turn)++ : 0;
}

static __always_inline void place_of(struct service *s, struct packet *p, struct place *at)
{
	switch (s->policy) {
	case STEER_BY_PACKET:
		/*
		 * The factor is odd, so 4,096 turns visit every bucket once. Its product with the
		 * order of Assign() is the golden ratio, so the slots alternate evenly. The upper
		 * bits spread the traffic of an empty slot.
		 */
		at->hash = next_turn(s) * 0x9e37796f;
		break;
	case STEER_BY_CPU:
		at->hash = bpf_get_smp_processor_id();
		at->slot = at->hash % (s->slots ? s->slots : 1) & (STEER_MAX_SLOTS - 1);
		return;
	case STEER_BY_FLOW:
	case STEER_BY_QUIC:
		at->hash = hash_flow(s, p);
		break;
	default:
		at->hash = weir_hash_addr(p->src, s->seed);
		if (s->flags & STEER_MOVED) {
			struct device_key key = { .service = s->id };
			__u32 *slot;

			__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
			slot = bpf_map_lookup_elem(&steer_moved, &key);
			/* For a removed slot the table decides. */
			if (slot && *slot < s->slots) {
				at->slot = *slot & (STEER_MAX_SLOTS - 1);
				return;
			}
		}
	}
	at->slot = s->bucket[at->hash & (STEER_BUCKETS - 1)] & (STEER_MAX_SLOTS - 1);
}

/* search is the input of divert. */
struct search {
	__u32 slot;
	__u32 hash;
	__u32 endpoint;
	__u32 tcp;
};

/*
 * The verifier treats a map value alike on every path. It therefore follows the search below once,
 * not once per path.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct search);
} steer_search SEC(".maps");

/* divert finds another complete slot: the same one for every protocol of a source. */
static __always_inline int divert(steer_ctx *ctx, struct service *s, struct packet *p,
				  struct place *at, __u32 endpoint)
{
	__u32 i, zero = 0, others = s->slots - 1, start;
	struct search *by = bpf_map_lookup_elem(&steer_search, &zero);

	if (!by || s->slots < 2)
		return 0;
	by->slot = at->slot;
	by->hash = at->hash;
	by->endpoint = endpoint;
	by->tcp = p->tcp;
	barrier();
	/* Each source starts at another slot, so all slots share the traffic of an empty one. */
	start = (by->hash >> 12) % others;
	for (i = 0; i < STEER_MAX_NEXT; i++) {
		__u32 row;

		if (i >= others)
			break;
		row = row_of(s, (by->slot + 1 + (start + i) % others) % s->slots);
		if (give(ctx, s, row, by->endpoint) == GIVEN) {
			struct verdicts *v = verdicts_of(row, by->tcp);

			if (v)
				v->guests++;
			return 1;
		}
	}
	return 0;
}

/* on_empty handles a packet for a slot without a complete member. */
static __always_inline int on_empty(steer_ctx *ctx, struct service *s, struct packet *p,
				    struct place *at, __u32 endpoint, struct verdicts *v)
{
	__u32 how = s->on_empty;

	/* SK_DROP sends an answer (RST, ICMP unreachable). Only a sink is silent. */
	if (how == STEER_DROP && !swallow(ctx, s, p)) {
		v->dropped++;
		return SK_PASS;
	}
	if (how == STEER_PASS && pass(ctx, at)) {
		v->passed++;
		return SK_PASS;
	}
	if ((how == STEER_NEXT || how == STEER_PASS) && divert(ctx, s, p, at, endpoint)) {
		barrier(); /* do not keep how in a register: the verifier would search twice */
		if (s->on_empty == STEER_NEXT)
			v->diverted++;
		else
			v->passed++;
		return SK_PASS;
	}
	v->rejected++;
	return SK_DROP;
}

/* steer_to assigns a packet to its slot. */
static __always_inline int steer_to(steer_ctx *ctx, struct service *s, struct packet *p,
				    struct place *at, __u32 endpoint)
{
	__u32 row = row_of(s, at->slot);
	struct verdicts *v = verdicts_of(row, p->tcp);

	if (!v)
		return SK_DROP; /* row out of range: never written by user space */
	if (give_known(ctx, s, p, row, endpoint)) {
		v->steered++;
		return SK_PASS;
	}
	switch (give(ctx, s, row, endpoint)) {
	case GIVEN:
		v->steered++;
		return SK_PASS;
	case NOT_WHOLE:
		if (give_before(ctx, s, row, endpoint)) {
			v->steered++;
			return SK_PASS;
		}
		return on_empty(ctx, s, p, at, endpoint, v);
	default:
		break;
	}
	/*
	 * The socket was connected or closed meanwhile. Never fall back to the kernel's choice: it
	 * would send the router to another collector.
	 */
	v->failed++;
	return SK_DROP;
}

struct signal_struct {
	struct {
		int counter;
	} live;
} __attribute__((preserve_access_index));

struct task_struct {
	struct signal_struct *signal;
} __attribute__((preserve_access_index));

/*
 * steer_exit withdraws the slots of a process when its last thread exits, before its descriptors
 * close. It withdraws all protocols at once, even if a surviving child has duplicates of every
 * socket (like pmacct's plugins).
 */
SEC("raw_tracepoint/sched_process_exit")
int steer_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx->args[0];
	struct exit_key key = { .tgid = bpf_get_current_pid_tgid() >> 32 };
	__u32 i;

	if (BPF_CORE_READ(task, signal, live.counter))
		return 0; /* other threads still run */
	for (i = 0; i < STEER_MAX_EXITS; i++) {
		struct slot *slot;
		__u32 *row;

		key.n = i;
		row = bpf_map_lookup_elem(&steer_exits, &key);
		if (!row)
			break;
		slot = bpf_map_lookup_elem(&steer_slots, row);
		/* Leave the slot alone if another process has it now. */
		if (slot && slot->tgid == key.tgid && slot->state == STEER_ADMITTED) {
			slot->state = STEER_EXITED;
			slot->since = bpf_ktime_get_ns();
		}
		bpf_map_delete_elem(&steer_exits, &key);
	}
	return 0;
}

#endif
