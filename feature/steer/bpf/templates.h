/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Layout of the maps of IPFIX (RFC 7011) and NetFlow v9 (RFC 3954) exporters for weir serve.
 * docs/PINS.md describes them. A change here changes record.ABI.
 */
#ifndef WEIR_TEMPLATES_H
#define WEIR_TEMPLATES_H

#define TEMPLATES_SESSIONS 32768 /* exporters times observation domains of a namespace */
#define TEMPLATES_SETS	   64	 /* sets read per message */
#define TEMPLATES_NOTED	   8	 /* sets recorded of the latest message */
#define TEMPLATES_CHUNK	   480	 /* bytes of templates in one entry of templates_store */

/*
 * Limits of the messages with templates passed to user space: a burst, then one message per gap in
 * nanoseconds. Source addresses can be forged, so there is a total limit as well. Known sessions
 * have a separate budget: forged exporters cannot exhaust it.
 */
#define TEMPLATES_SOURCES      16384	/* sources with a recorded rate */
#define TEMPLATES_SOURCE_BURST 1024	/* per address, or per /64 of IPv6 */
#define TEMPLATES_SOURCE_GAP   31250000 /* 32 per second */
#define TEMPLATES_NEW_BURST    16384	/* of unknown sessions, over all sources */
#define TEMPLATES_NEW_GAP      2000000	/* 500 per second */
#define TEMPLATES_KNOWN_BURST  32768	/* of known sessions, over all sources */
#define TEMPLATES_KNOWN_GAP    500000	/* 2,000 per second */

/* budget limits the messages of one kind. Only the filter uses it. */
struct budget {
	__u64 next; /* CLOCK_MONOTONIC, ns: time of the next message at the sustained rate */
};

/* port is a port of steered services. */
struct port {
	__u64 refused; /* messages with templates beyond a budget */
};

/*
 * weir sends replays in the exporter's name. To avoid learning from itself, it marks them in the IP
 * header, invisible to collectors: this identification (IPv4) or flow label (IPv6), and a TTL or
 * hop limit of 255.
 */
#define TEMPLATES_REPLAY_ID    0x7765  /* "we" */
#define TEMPLATES_REPLAY_LABEL 0x77656 /* 20 bits */
#define TEMPLATES_REPLAY_TTL   255

/* session is one observation domain (IPFIX) or source id (NetFlow v9) of one exporting process. */
struct session {
	__u8 src[16]; /* IPv4 as v4-mapped */
	__u8 dst[16];
	__u16 sport; /* host byte order, like all numbers here */
	__u16 dport;
	__u16 version; /* 9 or 10 */
	__u16 pad;
	__u32 domain;
};

/* noted is a set: its id (of a data set: the template's) and its length with the header. */
struct noted {
	__u16 id;
	__u16 length;
};

/* heard is the header of a session's latest message. The filter updates it in place. */
struct heard {
	__u64 last; /* CLOCK_MONOTONIC, ns; 0: silent since the session was remembered */
	__u64 messages;
	__u32 sequence;
	__u32 export_time; /* seconds since the epoch */
	__u32 uptime;	   /* NetFlow v9: milliseconds since the exporter booted */
	__u32 ifindex;
	__u32 sets; /* of the message; only the first TEMPLATES_NOTED are in set */
	struct noted set[TEMPLATES_NOTED];
	__u32 pad;
};

/* chunk is a piece of a remembered session. Only user space reads it. */
struct chunk_key {
	struct session session;
	__u32 n;
};

struct chunk {
	__u32 generation; /* of the writing: all chunks of a session have the same */
	__u32 crc;	  /* CRC-32 (IEEE) of the whole session */
	__u32 length;	  /* of the whole session, bytes */
	__u32 pad;
	__u8 data[TEMPLATES_CHUNK];
};

/* counts of a service, by name. */
struct counts {
	__u64 learnt;	/* templates learnt or changed */
	__u64 replayed; /* sessions replayed */
	__u64 refused;	/* messages not remembered: malformed, or no room */
};

#endif
