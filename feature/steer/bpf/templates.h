/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Layout of the maps by which weir serve follows exporters of IPFIX (RFC 7011) and NetFlow v9 (RFC
 * 3954). docs/PINS.md describes them; a change here is a change of steer.ABI.
 */
#ifndef WEIR_TEMPLATES_H
#define WEIR_TEMPLATES_H

#define TEMPLATES_SESSIONS 32768 /* exporters times observation domains of a namespace */
#define TEMPLATES_SETS	   64	 /* sets of a message that are looked at */
#define TEMPLATES_NOTED	   8	 /* sets of the latest message that are noted */
#define TEMPLATES_CHUNK	   480	 /* bytes of templates in one entry of templates_store */

/*
 * Messages with templates that the filter gives to user space, at most: a burst, then one every so
 * many nanoseconds. Anybody can forge a source address, so the sum is bounded too. Messages of
 * sessions that are known have a budget of their own: forged exporters cannot use it up.
 */
#define TEMPLATES_SOURCES      16384	/* whose rate is known at a time */
#define TEMPLATES_SOURCE_BURST 1024	/* of one address, or one /64 of IPv6 */
#define TEMPLATES_SOURCE_GAP   31250000 /* 32 a second */
#define TEMPLATES_NEW_BURST    16384	/* of sessions that are not known, of all sources */
#define TEMPLATES_NEW_GAP      2000000	/* 500 a second */
#define TEMPLATES_KNOWN_BURST  32768	/* of known sessions, of all sources */
#define TEMPLATES_KNOWN_GAP    500000	/* 2,000 a second */

/* budget bounds the messages of one kind; the filter alone uses it. */
struct budget {
	__u64 next; /* CLOCK_MONOTONIC, ns: when the next message is due at the bare rate */
};

/* port is a port that steered services listen on. */
struct port {
	__u64 refused; /* messages with templates beyond a budget */
};

/*
 * Replays are made by weir and look like the exporter's own. What tells them from those, so that
 * weir does not learn from itself, is in the IP header, where no collector sees it: this
 * identification (IPv4) or flow label (IPv6) together with a TTL or hop limit of 255.
 */
#define TEMPLATES_REPLAY_ID    0x7765  /* "we" */
#define TEMPLATES_REPLAY_LABEL 0x77656 /* of 20 bits */
#define TEMPLATES_REPLAY_TTL   255

/* session is one observation domain (IPFIX) or source id (NetFlow v9) of one exporting process. */
struct session {
	__u8 src[16]; /* IPv4 as v4-mapped */
	__u8 dst[16];
	__u16 sport; /* host byte order, as all numbers here */
	__u16 dport;
	__u16 version; /* 9 or 10 */
	__u16 pad;
	__u32 domain;
};

/* noted is a set: its number, which for data is the template's, and its length with its header. */
struct noted {
	__u16 id;
	__u16 length;
};

/* heard is the header of a session's latest message; the filter writes it in place. */
struct heard {
	__u64 last; /* CLOCK_MONOTONIC, ns; 0: not since the session was remembered */
	__u64 messages;
	__u32 sequence;
	__u32 export_time; /* seconds since the epoch */
	__u32 uptime;	   /* NetFlow v9: milliseconds since the exporter booted */
	__u32 ifindex;
	__u32 sets; /* of the message; those beyond TEMPLATES_NOTED are not in set */
	struct noted set[TEMPLATES_NOTED];
	__u32 pad;
};

/* chunk is a piece of what user space remembers of a session; only user space reads it. */
struct chunk_key {
	struct session session;
	__u32 n;
};

struct chunk {
	__u32 generation; /* of a rewriting: pieces of one are of one */
	__u32 crc;	  /* CRC-32 (IEEE) of the whole */
	__u32 length;	  /* of the whole, bytes */
	__u32 pad;
	__u8 data[TEMPLATES_CHUNK];
};

/* counts of a service, by its name. */
struct counts {
	__u64 learnt;	/* templates learnt or changed */
	__u64 replayed; /* sessions replayed */
	__u64 refused;	/* messages that could not be remembered: malformed, or no room */
};

#endif
