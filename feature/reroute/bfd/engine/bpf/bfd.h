/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * BFD sessions (RFC 5880, 5881) in the kernel. Times are nanoseconds of CLOCK_MONOTONIC, intervals
 * microseconds as on the wire, unless stated otherwise.
 */
#ifndef WEIR_BFD_H
#define WEIR_BFD_H

#define BFD_SESSIONS  1024 /* per network namespace */
#define BFD_PORT      3784
#define BFD_ECHO_PORT 3785
#define BFD_HOPS      255 /* hop limit, sent and required: RFC 5881 section 5 */
#define BFD_ECHO_HOPS 254 /* hop limit of a returned echo, forwarded once by the neighbour */
#define BFD_ECHO_RING 256 /* at least the largest multiplier; a power of two */
#define BFD_ECHO_UNIT 10  /* send times are in units of 2^10 ns */
#define BFD_HEAD      24
#define BFD_AUTH      28
#define BFD_SLOW      1000000 /* us between packets while not up: RFC 5880 section 6.8.3 */
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

/* Whether a session has been up since the last shutdown of either end. */
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
	__u8 bits; /* state, and the flags above */
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

/* The configuration of a session. Only user space writes it. */
struct bfd_setup {
	__u32 generation; /* increases with each change; 0: no session */
	__u32 ifindex;
	__u32 link; /* device of the link state to write, 0 for none */
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
	__u8 secret[BFD_SECRET]; /* zero-padded */
	__u32 local[4];		 /* IPv4: in the first word, network byte order */
	__u32 peer[4];
};

/* The state of a session. Only programs write it, under its lock. */
struct bfd_state {
	struct bpf_spin_lock lock;
	__u32 generation; /* of the adopted setup */
	__u8 state;
	__u8 diag;
	__u8 poll;
	__u8 poll_again;
	__u8 final;	 /* a poll needs an answer */
	__u8 auth_known; /* received is valid */
	__u8 was_up;	 /* enum bfd_was_up */
	__u8 spare;
	__u32 changes;	/* of the state, or of the peer's values */
	__u32 told;	/* changes reported to user space */
	__u32 tx_floor; /* RFC 5880 section 6.8.3: interval until the poll sequence ends; 0: none */
	__u32 rx_in_use;
	__u32 said_tx; /* intervals of the adopted setup */
	__u32 said_rx;
	/* The peer's last values. */
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
	__be16 remote_port; /* the peer's source port; 0: unknown */
	__u8 spare2[2];
	__u64 since; /* in this state */
	__u64 next;  /* time of the next packet; 0: at once */
	__u64 heard; /* time of the last packet; 0: none yet */
	__u64 wait; /* no verdict before, after a stall; without a peer: end of the sequence number's validity */
	__u64 suspect; /* first delay of a verdict by stalls; 0: none */
	__u64 ups;
	__u64 downs;
	__u64 in;
	__u64 in_bytes;
	__u64 out;
	__u64 out_bytes;
	__u64 not_authentic;
	__u64 malformed;
};

/*
 * The echo function of a session. User space writes the whole struct, with only wanted set;
 * otherwise programs write it under the session's lock.
 */
struct bfd_echo {
	__u32 wanted;	/* shortest us between packets; 0: none */
	__u32 sequence; /* of the last packet sent */
	__u32 back;	/* of the newest packet returned */
	__u32 failed;	/* multiplier packets were lost, and none has returned since */
	__u64 nonce;
	__u64 next;
	__u64 suspect;
	__u32 rtt; /* ns */
	__u32 rtt_dev;
	__u64 sent;
	__u64 returned;
	__u64 refused; /* packets with a wrong identification */
	__u64 failures;
	__u32 at[BFD_ECHO_RING]; /* send time by sequence */
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
