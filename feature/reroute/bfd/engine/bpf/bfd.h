/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * BFD sessions (RFC 5880, 5881) as the kernel runs them. Times are nanoseconds of CLOCK_MONOTONIC,
 * intervals microseconds as on the wire, unless said otherwise.
 */
#ifndef WEIR_BFD_H
#define WEIR_BFD_H

#define BFD_SESSIONS  1024 /* of a network namespace */
#define BFD_PORT      3784
#define BFD_ECHO_PORT 3785
#define BFD_HOPS      255 /* RFC 5881, 5: of what is sent, and of what is taken */
#define BFD_ECHO_HOPS 254 /* of an echo that comes back: the neighbour has forwarded it */
#define BFD_ECHO_RING 256 /* as many as a multiplier may be; a power of two */
#define BFD_ECHO_UNIT 10  /* times of sending are in 2^10 ns */
#define BFD_HEAD      24
#define BFD_AUTH      28
#define BFD_SLOW      1000000 /* us between packets of a session that is not up: RFC 5880, 6.8.3 */
#define BFD_SECRET    20

enum bfd_session_state {
	BFD_ADMIN_DOWN,
	BFD_DOWN,
	BFD_INIT,
	BFD_UP,
};

enum bfd_diag {
	BFD_NO_DIAG = 0,
	BFD_TIME_EXPIRED = 1,
	BFD_ECHO_FAILED = 2,
	BFD_NEIGHBOUR_DOWN = 3,
	BFD_ADMIN_DIAG = 7,
};

/* Whether a session has been up since either end last shut it down. */
enum bfd_was_up {
	BFD_NOT_YET_UP,
	BFD_HAS_BEEN_UP,
};

#define BFD_POLL	0x20
#define BFD_FINAL	0x10
#define BFD_INDEPENDENT 0x08
#define BFD_HAS_AUTH	0x04
#define BFD_DEMAND	0x02
#define BFD_MULTIPOINT	0x01

#define BFD_KEYED_SHA1	    4
#define BFD_METICULOUS_SHA1 5

/* A control packet with keyed SHA1, in network byte order. */
struct bfd_packet {
	__u8 vers_diag;
	__u8 bits; /* state, and those above */
	__u8 multiplier;
	__u8 length;
	__be32 mine;
	__be32 yours;
	__be32 desired_tx;
	__be32 required_rx;
	__be32 echo_rx;
	__u8 auth_type;
	__u8 auth_length;
	__u8 auth_key;
	__u8 auth_reserved;
	__be32 auth_sequence;
	__u8 digest[20];
};

/* What user space wants of a session; it alone writes this. */
struct bfd_setup {
	__u32 generation; /* another one is a change; 0: there is no session */
	__u32 ifindex;
	__u32 link; /* whose word says that the session is not up: its device, 0 for none */
	__u32 mine; /* discriminator */
	__u32 desired_tx;
	__u32 required_rx;
	__u32 echo_rx;
	__u8 multiplier;
	__u8 passive;
	__u8 down; /* administratively */
	__u8 auth; /* type; 0: none */
	__u8 key;
	__u8 ipv6;
	__be16 source_port;
	__u8 secret[BFD_SECRET]; /* zeroes behind it */
	__u32 local[4];		 /* IPv4: the first word alone, network byte order */
	__u32 peer[4];
};

/* What a session is. The programs alone write this, under its lock. */
struct bfd_state {
	struct bpf_spin_lock lock;
	__u32 generation; /* of the setup that it goes by */
	__u8 state;
	__u8 diag;
	__u8 poll;
	__u8 poll_again;
	__u8 final;	 /* the other end has polled and is to be answered */
	__u8 auth_known; /* received of is right */
	__u8 was_up;	 /* enum bfd_was_up */
	__u8 spare;
	__u32 changes;	/* of its state, or of what the other end says of itself */
	__u32 told;	/* of them user space has been told */
	__u32 tx_floor; /* RFC 5880, 6.8.3: what applies until a poll sequence ends; 0: nothing */
	__u32 rx_in_use;
	__u32 said_tx; /* the intervals of the setup that it goes by */
	__u32 said_rx;
	/* What the other end last said. */
	__u32 yours;
	__u32 remote_tx;
	__u32 remote_rx;
	__u32 remote_echo_rx;
	__u8 remote_state;
	__u8 remote_diag;
	__u8 remote_multiplier;
	__u8 remote_bits; /* BFD_DEMAND, BFD_INDEPENDENT */
	__u32 sent_sequence;
	__u32 received;
	__be16 remote_port; /* from which the other end sends; 0: not known */
	__u8 spare2[2];
	__u64 since; /* in this state */
	__u64 next;  /* to be sent; 0: at once */
	__u64 heard; /* when the last packet came; 0: none yet */
	__u64 wait; /* not taken for silent before: this host stood still; silent, when the sequence number is forgotten */
	__u64 suspect; /* when its end was first put off for that; 0: it was not */
	__u64 ups;
	__u64 downs;
	__u64 in;
	__u64 in_bytes;
	__u64 out;
	__u64 out_bytes;
	__u64 not_authentic;
	__u64 malformed;
};

/* A session's echo function. User space writes it as a whole, with wanted alone; else programs do, under the session's lock. */
struct bfd_echo {
	__u32 wanted;	/* least us between packets; 0: none */
	__u32 sequence; /* of the last that was sent */
	__u32 back;	/* of the newest that came back */
	__u32 failed;	/* as many as the multiplier did not come back, and none since */
	__u64 nonce;
	__u64 next;
	__u64 suspect;
	__u32 rtt; /* ns */
	__u32 rtt_dev;
	__u64 sent;
	__u64 returned;
	__u64 refused; /* that claimed to be ours */
	__u64 failures;
	__u32 at[BFD_ECHO_RING]; /* when it was sent, by sequence */
};

struct bfd_event {
	__u64 time;
	__u32 session; /* its place */
	__u32 mine;
	__u8 state;
	__u8 diag;
	__u8 spare[6];
};

#endif
