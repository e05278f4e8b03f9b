/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * This header keeps the TCP sessions of a C or C++ server alive when its process ends. A keeper
 * (weir serve or weir handoff keep) has a duplicate of each connection. docs/HANDOFF.md lists the
 * guarantees.
 *
 *	struct weir_handoff h;
 *	struct weir_session s;
 *
 *	if (weir_handoff_init(&h, "telemetry", "0", NULL))
 *		errx(1, "%s", h.error);
 *	fd = weir_handoff_find(&h, "tcp :1790");	// the predecessor's, or -1
 *	if (fd < 0)
 *		fd = my_listen(1790);
 *	weir_handoff_start(&h, fd, "tcp :1790");
 *	for (;;)
 *		if (weir_handoff_accept(&h, &s, -1) > 0)	// or poll weir_handoff_fd(&h)
 *			serve(&s);
 *		else if (weir_handoff_short(errno))
 *			usleep(100000);		// until descriptors are free: the connection waits
 *		else if (errno != EINTR)
 *			break;			// ECANCELED: replaced
 *	weir_handoff_stop(&h);
 *
 * weir_handoff_transfer() gives a session to a member by name. To survive SIGKILL, read with
 * weir_session_recv() and write with weir_session_send(). Call weir_handoff_commit() with the
 * application's state after each read. Sockets are non-blocking, because other processes share that
 * flag. If another process owns a session, recv, send and commit fail with ESTALE. Close the
 * session then. A struct weir_handoff is not safe for concurrent use. Requires C99 (-std=gnu99, or
 * _GNU_SOURCE) or C++, and no library.
 */
#ifndef WEIR_HANDOFF_H
#define WEIR_HANDOFF_H

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEIR_NO_DESCRIPTORS_ "no descriptors are left (RLIMIT_NOFILE)"
#define WEIR_HANDOFF_SOCKET  "/run/weir/handoff.sock" /* unless $WEIR_HANDOFF_SOCKET is set */

enum { WEIR_HEADER_ = 48, WEIR_NAME_ = 63, WEIR_TEXT_ = 1024, WEIR_INLINE_ = 65536 };
/* Timeouts for an answer and for a keeper that does not read, and the time between attempts to
 * reconnect. */
enum { WEIR_TIMEOUT_MS_ = 5000, WEIR_PATIENCE_MS_ = 2000, WEIR_RETRY_MS_ = 250 };
/*
 * Times of a replaced member: the default of proof_ms, between attempts to hand over returned
 * sessions, and between checks whether it may end.
 */
enum { WEIR_PROOF_MS_ = 1000, WEIR_TRY_MS_ = 2000, WEIR_TRY_LAST_MS_ = 60000, WEIR_LOOK_MS_ = 50 };
/* MFD_CLOEXEC | MFD_ALLOW_SEALING, F_ADD_SEALS, F_SEAL_*: the headers require _GNU_SOURCE for them. */
enum { WEIR_MFD_FLAGS_ = 3, WEIR_ADD_SEALS_ = 1033, WEIR_SEALS_ = 15 };
enum { WEIR_PEEK_OFF_ = 42 }; /* SO_PEEK_OFF */

enum {
	WEIR_HELLO_ = 1,
	WEIR_READY_ = 2,
	WEIR_LEAVE_ = 3,
	WEIR_KEEP_ = 4,
	WEIR_COMMIT_ = 5,
	WEIR_DROP_ = 6,
	WEIR_TRANSFER_ = 7,
	WEIR_TOOK_ = 8,
	WEIR_REFUSE_ = 9,
	WEIR_FIND_ = 10,
	WEIR_AGREE_ = 0x12,
	WEIR_WELCOME_ = 0x81,
	WEIR_ERROR_ = 0x82,
	WEIR_OK_ = 0x83,
	WEIR_GIVE_ = 0x84,
	WEIR_MOVE_ = 0x85,
	WEIR_REPLACED_ = 0x86,
	WEIR_ALONE_ = 0x88,
	WEIR_LIMITS_ = 0x92,
	WEIR_STANDBY_ = 64,	 /* a capability */
	WEIR_READY_STANDBY_ = 4, /* numbers of Ready */
	WEIR_READY_ENDS_ = 8,
	WEIR_CRASHED_ = 2,
	WEIR_STATE_FD_ = 0x8000,
	WEIR_STREAM_ = 1,
	WEIR_LISTENER_ = 2,
	WEIR_LIMIT_ = 7,
	WEIR_OWNED_ = 9,
	WEIR_LOST_ = 12
};

/* A connection. read and written are positions: bytes since the beginning of the connection. */
struct weir_session {
	int fd;
	int received;  /* another process owned it before */
	int crashed;   /* and died with it */
	uint64_t id;   /* SO_COOKIE */
	uint64_t read; /* taken out of the socket */
	uint64_t written;
	uint64_t replay;      /* bytes to be written again that the predecessor has already sent */
	size_t seen;	      /* returned by weir_session_recv, not committed */
	unsigned char *state; /* as committed by the predecessor; NULL for a new session */
	size_t state_len;
	unsigned char *unread; /* read by the predecessor, not covered by its state */
	size_t unread_len, unread_off;
	struct weir_note_ *note;
};

/*
 * The library's record of a session as of its last commit, for the next keeper. It is on a list of
 * all sessions until the session is closed or transferred. Until then fd stays open.
 */
struct weir_note_ {
	uint64_t session, read, written;
	int fd;
	unsigned int kept; /* number of the keeper connection that keeps it */
	int refused;	   /* the keeper rejected it; the next commit waits for the answer */
	int moved;	   /* owned by another process, or possibly */
	int cut;	   /* possibly: the keeper exited during the transfer */
	int over; /* after such a transfer: closed by the caller, fd belongs to the library */
	unsigned char *mem; /* a copy of state, followed by unread */
	size_t state_len, unread_len;
	size_t has; /* size of both at this keeper, as far as known */
	struct weir_note_ *next, **at;
};

struct weir_message_ {
	unsigned int type, flags, seq, number;
	uint64_t session, read, written;
	const char *name, *text;
	size_t name_len, text_len;
	const void *state, *unread;
	size_t state_len, unread_len;
	int fd;	 /* to send, or received and owned by the receiver; -1: none */
	int cut; /* received without its descriptors, because this process has reached its limit */
	unsigned char *mem; /* received: contains state and unread */
};

struct weir_given_ {
	struct weir_session session;
	struct weir_given_ *next;
};

/* An order to move a session to a member. */
struct weir_order_ {
	uint64_t session;
	char to[64];
	struct weir_order_ *next;
};

struct weir_handoff {
	/*
	 * Set this between weir_handoff_init() and weir_handoff_start() to support moves on
	 * request: weir handoff send, or a change of steering. weir_handoff_accept() calls it with
	 * the number of a session (id; 0: all) and the name of a member ("": any). The function
	 * then calls weir_handoff_transfer(). On failure the session stays. When a newer process of
	 * this name is ready, weir_handoff_accept() calls it with 0 and that name, and again for
	 * returned sessions.
	 */
	void (*move)(struct weir_handoff *h, uint64_t session, const char *to);
	void *arg; /* for the caller */
	/*
	 * The required life of a newer process before this one counts as replaced, in milliseconds.
	 * 0 means 1000. Set it before weir_handoff_start().
	 */
	int proof_ms;

	int conn;     /* -1: no keeper */
	int broken;   /* the keeper has exited: conn still has unread messages */
	int hello;    /* a connection waiting for the answer to Hello; -1: none */
	int listener; /* -1: none */
	uint64_t listener_id;
	int epoll;
	int timer;    /* in epoll: wakes the caller without a keeper, and once if woken is set */
	int woken;    /* a message for weir_handoff_accept() was already read from conn */
	int replaced; /* a newer process of this name has proved itself: hand over and end */
	int ready;
	int standby;	      /* the keeper supports members on standby */
	int proving;	      /* a newer process is ready but not proved yet: accept nothing */
	int64_t proof, again; /* end of its proof; the next attempt to hand over */
	int pause;	      /* until the attempt after that, in ms */
	unsigned int seq, generation;
	size_t max_state; /* from the keeper; may change at any time */
	char service[64], name[64], label[256];
	char socket[108]; /* the keeper's, as given by the caller */
	struct sockaddr_un keeper;
	socklen_t keeper_len;
	int64_t retry, hello_end; /* the next attempt to connect, and its timeout */
	struct weir_given_ *given, **last;
	struct weir_order_ *orders, **last_order;
	struct weir_note_ *notes;
	struct weir_note_ *spare; /* for the next accepted connection */
	char error[512];	  /* text of the last error */
	unsigned int code;	  /* code of the protocol if the keeper rejects; 7: over a limit */
};

static inline int weir_fail_(struct weir_handoff *h, const char *format, ...)
{
	int was = errno;
	va_list args;

	va_start(args, format);
	vsnprintf(h->error, sizeof(h->error), format, args);
	va_end(args);
	h->code = 0;
	errno = was;
	return -1;
}

/* Returns milliseconds of a monotonic clock. */
static inline int64_t weir_now_(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Returns the time left until end, for poll; -1 for end -1 (no limit). */
static inline int weir_left_(int64_t end)
{
	int64_t left = end - weir_now_();

	return end < 0 ? -1 : left < 0 ? 0 : (int)left;
}

static inline void weir_put_(unsigned char *b, uint64_t v, int bytes)
{
	for (; bytes-- > 0; v >>= 8)
		*b++ = (unsigned char)v;
}

static inline uint64_t weir_get_(const unsigned char *b, int bytes)
{
	uint64_t v = 0;

	while (bytes-- > 0)
		v = v << 8 | b[bytes];
	return v;
}

/* Returns a sealed memfd with state and unread, if they do not fit into a message. */
static inline int weir_spill_(const struct weir_message_ *m)
{
	const unsigned char *part[2];
	size_t len[2];
	int i, fd = (int)syscall(SYS_memfd_create, "weir-handoff-state", WEIR_MFD_FLAGS_);

	part[0] = (const unsigned char *)m->state;
	part[1] = (const unsigned char *)m->unread;
	len[0] = m->state_len;
	len[1] = m->unread_len;
	for (i = 0; fd >= 0 && i < 2; i++)
		while (len[i] > 0) {
			ssize_t n = write(fd, part[i], len[i]);

			if (n < 0 && errno == EINTR)
				continue;
			if (n <= 0) {
				close(fd);
				return -1;
			}
			part[i] += n;
			len[i] -= (size_t)n;
		}
	if (fd >= 0 && fcntl(fd, WEIR_ADD_SEALS_, WEIR_SEALS_)) {
		close(fd);
		return -1;
	}
	return fd;
}

/*
 * Makes weir_handoff_fd() readable periodically without a keeper or on standby, and once if woken
 * is set.
 */
static inline void weir_timer_(struct weir_handoff *h)
{
	struct itimerspec t;

	memset(&t, 0, sizeof(t));
	t.it_interval.tv_nsec = 1000000L * (h->conn < 0 ? WEIR_RETRY_MS_ :
					    h->proving	? WEIR_LOOK_MS_ :
							  0);
	t.it_value.tv_nsec = h->woken ? 1 : t.it_interval.tv_nsec;
	timerfd_settime(h->timer, 0, &t, NULL);
}

/* Handles the end of the keeper: sessions continue unkept. See weir_reconnect_(). */
static inline void weir_lost_keeper_(struct weir_handoff *h)
{
	if (h->conn >= 0)
		close(h->conn);
	if (h->hello >= 0)
		close(h->hello);
	h->conn = h->hello = -1;
	h->broken = 0;
	h->retry = weir_now_() + WEIR_RETRY_MS_;
	weir_timer_(h);
}

/*
 * Sends a message. Returns 0, or -1 without a keeper. A keeper that does not read counts as gone.
 * Messages from a gone keeper are still read: a session given in one of them is nowhere else.
 */
static inline int weir_send_(struct weir_handoff *h, const struct weir_message_ *m)
{
	unsigned char head[WEIR_HEADER_];
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control;
	int64_t end = weir_now_() + WEIR_PATIENCE_MS_;
	struct iovec part[5];
	struct msghdr msg;
	struct pollfd p;
	int fds[2], n = 0, large = -1, error;
	unsigned int flags = m->flags;
	ssize_t sent;

	if (h->conn < 0)
		return weir_fail_(h, "weir: no keeper answers on %s", h->socket);
	if (m->fd >= 0)
		fds[n++] = m->fd;
	if (m->state_len + m->unread_len > WEIR_INLINE_) {
		large = weir_spill_(m);
		if (large < 0)
			return weir_fail_(h, "weir: store %zu bytes of state in a memfd: %s",
					  m->state_len, strerror(errno));
		fds[n++] = large;
		flags |= WEIR_STATE_FD_;
	}
	memset(head, 0, sizeof(head));
	head[0] = 1;
	head[1] = (unsigned char)m->type;
	weir_put_(head + 2, flags, 2);
	weir_put_(head + 4, m->seq, 4);
	weir_put_(head + 8, m->session, 8);
	weir_put_(head + 16, m->read, 8);
	weir_put_(head + 24, m->written, 8);
	weir_put_(head + 32, m->number, 4);
	head[36] = (unsigned char)m->name_len;
	weir_put_(head + 38, m->text_len, 2);
	weir_put_(head + 40, m->state_len, 4);
	weir_put_(head + 44, m->unread_len, 4);
	memset(&msg, 0, sizeof(msg));
	part[0].iov_base = head;
	part[0].iov_len = sizeof(head);
	part[1].iov_base = (void *)(uintptr_t)m->name;
	part[1].iov_len = m->name_len;
	part[2].iov_base = (void *)(uintptr_t)m->text;
	part[2].iov_len = m->text_len;
	part[3].iov_base = (void *)(uintptr_t)m->state;
	part[3].iov_len = m->state_len;
	part[4].iov_base = (void *)(uintptr_t)m->unread;
	part[4].iov_len = m->unread_len;
	msg.msg_iov = part;
	msg.msg_iovlen = large < 0 ? 5 : 3;
	if (n > 0) {
		memset(&control, 0, sizeof(control));
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE((size_t)n * sizeof(int));
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), fds, (size_t)n * sizeof(int));
	}
	p.fd = h->conn;
	p.events = POLLOUT;
	while ((sent = sendmsg(h->conn, &msg, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0) {
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN || weir_left_(end) == 0)
			break;
		poll(&p, 1, weir_left_(end));
	}
	error = errno;
	if (large >= 0)
		close(large);
	if (sent >= 0)
		return 0;
	weir_fail_(h, "weir: the keeper: %s", strerror(error));
	if (error == EPIPE || error == ECONNRESET)
		h->broken = 1;
	else
		weir_lost_keeper_(h);
	return -1;
}

/* Reads the state of a message from its memfd, the last descriptor. The state is stored behind name
 * and text. */
static inline int weir_fetch_(struct weir_message_ *m, int fd)
{
	size_t head = WEIR_HEADER_ + m->name_len + m->text_len;
	size_t total = m->state_len + m->unread_len, done = 0;
	unsigned char *mem;
	struct stat st;

	if (fstat(fd, &st) || (uint64_t)st.st_size != total)
		return -1;
	mem = (unsigned char *)realloc(m->mem, head + total);
	if (!mem)
		return -1;
	m->mem = mem;
	m->name = (const char *)mem + WEIR_HEADER_;
	m->text = m->name + m->name_len;
	m->state = mem + head;
	m->unread = mem + head + m->state_len;
	while (done < total) {
		ssize_t n = pread(fd, mem + head + done, total - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1;
		done += (size_t)n;
	}
	return 0;
}

/*
 * Receives a message. Returns 1, 0 if none arrives by end (0: now), or -1 if the keeper has exited.
 * The caller frees mem.
 */
static inline int weir_receive_(struct weir_handoff *h, struct weir_message_ *m, int64_t end)
{
	size_t size = WEIR_HEADER_ + WEIR_NAME_ + WEIR_TEXT_ + WEIR_INLINE_;
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct pollfd p;
	struct iovec part;
	struct msghdr msg;
	struct cmsghdr *c;
	int fds[2] = { -1, -1 }, bad, cut;
	size_t inside;
	ssize_t n;

	memset(m, 0, sizeof(*m));
	m->fd = -1;
	p.fd = h->conn;
	p.events = POLLIN;
	if (h->conn < 0)
		return -1;
	m->mem = (unsigned char *)malloc(size);
	if (!m->mem) { /* a lost answer would confuse later ones: reconnect */
		weir_lost_keeper_(h);
		return weir_fail_(h, "weir: no memory");
	}
	memset(&msg, 0, sizeof(msg));
	part.iov_base = m->mem;
	part.iov_len = size;
	msg.msg_iov = &part;
	msg.msg_iovlen = 1;
	msg.msg_control = &control;
	msg.msg_controllen = sizeof(control);
	/*
	 * Signals may interrupt both calls repeatedly; none restarts the time limit. The error
	 * about a keeper that exited with unread data occurs once, before its messages.
	 */
	while ((n = recvmsg(h->conn, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
		if (errno == EINTR || errno == ECONNRESET)
			continue;
		if (errno != EAGAIN)
			break;
		if (weir_left_(end) == 0) {
			free(m->mem);
			m->mem = NULL;
			return 0;
		}
		poll(&p, 1, weir_left_(end));
	}
	for (c = n > 0 ? CMSG_FIRSTHDR(&msg) : NULL; c; c = CMSG_NXTHDR(&msg, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	/* Fewer descriptors than expected: the message is complete and can be rejected. */
	cut = n > 0 && (msg.msg_flags & MSG_CTRUNC) && fds[1] < 0;
	bad = n < WEIR_HEADER_ || m->mem[0] != 1 || (msg.msg_flags & MSG_TRUNC) ||
	      (!cut && (msg.msg_flags & MSG_CTRUNC));
	if (!bad) {
		m->type = m->mem[1];
		m->flags = (unsigned int)weir_get_(m->mem + 2, 2);
		m->seq = (unsigned int)weir_get_(m->mem + 4, 4);
		m->session = weir_get_(m->mem + 8, 8);
		m->read = weir_get_(m->mem + 16, 8);
		m->written = weir_get_(m->mem + 24, 8);
		m->number = (unsigned int)weir_get_(m->mem + 32, 4);
		m->name_len = m->mem[36];
		m->text_len = (size_t)weir_get_(m->mem + 38, 2);
		m->state_len = (size_t)weir_get_(m->mem + 40, 4);
		m->unread_len = (size_t)weir_get_(m->mem + 44, 4);
		m->name = (const char *)m->mem + WEIR_HEADER_;
		m->text = m->name + m->name_len;
		m->state = m->text + m->text_len;
		m->unread = (const unsigned char *)m->state + m->state_len;
		inside = m->flags & WEIR_STATE_FD_ ? 0 : m->state_len + m->unread_len;
		bad = WEIR_HEADER_ + m->name_len + m->text_len + inside != (size_t)n;
	}
	if (cut && !bad) { /* it is unknown which one is missing */
		m->cut = 1;
		m->state_len = m->unread_len = 0;
		if (fds[0] >= 0)
			close(fds[0]);
		return 1;
	}
	m->fd = fds[0];
	if (!bad && (m->flags & WEIR_STATE_FD_)) {
		bad = weir_fetch_(m, fds[1] >= 0 ? fds[1] : fds[0]);
		if (fds[1] < 0) {
			close(fds[0]);
			m->fd = fds[0] = -1;
		}
	}
	if (fds[1] >= 0)
		close(fds[1]);
	if (!bad)
		return 1;
	free(m->mem);
	m->mem = NULL;
	if (fds[0] >= 0)
		close(fds[0]);
	weir_lost_keeper_(h);
	return weir_fail_(h, "weir: the keeper on %s has exited", h->socket);
}

/* Reads the positions of a connection from the kernel. Returns 0, or -1 for a closed one. */
static inline int weir_positions_(int fd, uint64_t *read_at, uint64_t *written_at)
{
	/* tcpi_state, tcpi_bytes_acked, tcpi_bytes_received of linux/tcp.h: glibc's header may lack
	 * them. */
	enum { STATE = 0, ACKED = 120, RECEIVED = 128, SIZE = 136 };
	const unsigned int fin_received =
		1u << 8 | 1u << 9 | 1u << 11; /* CLOSE_WAIT, LAST_ACK, CLOSING */
	const unsigned int fin_sent = 1u << 4 | 1u << 5 | 1u << 9 | 1u << 11; /* FIN_WAIT1 and 2 */
	unsigned char a[SIZE], b[SIZE];
	int in, out;

	for (;;) {
		socklen_t la = SIZE, lb = SIZE;

		if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, a, &la) || ioctl(fd, FIONREAD, &in) ||
		    ioctl(fd, TIOCOUTQ, &out) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, b, &lb))
			return -1;
		if (la < SIZE || b[STATE] == 7)
			return -1; /* before Linux 4.1; closed */
		if (a[STATE] == b[STATE] && !memcmp(a + ACKED, b + ACKED, 16))
			break;
	}
	*read_at = weir_get_(a + RECEIVED, 8) - (uint64_t)in - (fin_received >> a[STATE] & 1);
	*written_at = weir_get_(a + ACKED, 8) + (uint64_t)out - (fin_sent >> a[STATE] & 1);
	return 0;
}

/*
 * Reports whether to read again after EAGAIN. A read at an urgent byte fails with EAGAIN if a
 * signal is pending, although data is available. tries limits the attempts, because kTLS always
 * returns EAGAIN there.
 */
static inline int weir_at_mark_(int fd, int *tries)
{
	int at = 0, queued = 0;

	return ++*tries <= 100 && !ioctl(fd, SIOCATMARK, &at) && at &&
	       !ioctl(fd, FIONREAD, &queued) && queued > 0;
}

/* Discards n available bytes of the receive queue. */
static inline int weir_discard_(int fd, uint64_t n)
{
	char none
		[16384]; /* kTLS writes to the buffer despite MSG_TRUNC; only plain TCP does not: tcp(7) */
	int tries = 0;

	while (n > 0) {
		size_t want = n < sizeof(none) ? (size_t)n : sizeof(none);
		ssize_t got = recv(fd, none, want, MSG_TRUNC | MSG_DONTWAIT);

		if (got < 0 && (errno == EINTR || (errno == EAGAIN && weir_at_mark_(fd, &tries))))
			continue;
		if (got <= 0)
			return -1;
		n -= (uint64_t)got;
	}
	return 0;
}

static inline void weir_free_(struct weir_session *s)
{
	free(s->state);
	free(s->unread);
	s->state = s->unread = NULL;
	s->state_len = s->unread_len = s->unread_off = 0;
}

/* Sets the offset of peeks from the beginning of the queue; -1: none. Returns 0, or -1 before Linux
 * 6.9. */
static inline int weir_peek_off_(int fd, int off)
{
	return setsockopt(fd, SOL_SOCKET, WEIR_PEEK_OFF_, &off, sizeof(off));
}

/*
 * Initializes a session from the kernel's data. An urgent byte (MSG_OOB) becomes part of the
 * stream. Otherwise the kernel would count it as received, but no read would return it. Connections
 * inherit this option from their listener.
 */
static inline int weir_begin_(struct weir_session *s, int fd)
{
	socklen_t len = sizeof(s->id);
	int proto = 0, one = 1;

	memset(s, 0, sizeof(*s));
	s->fd = fd;
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
	setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &one, sizeof(one));
	weir_peek_off_(fd, -1); /* a process may have been killed in weir_peek_ */
	if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &s->id, &len))
		return -1;
	len = sizeof(proto);
	getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &proto, &len);
	return proto == IPPROTO_TCP ? 0 : -1;
}

/* Returns a buffer with state, followed by the bytes not covered by it: unread, then bytes not
 * returned yet. */
static inline unsigned char *weir_pack_(const struct weir_session *s, const void *state,
					size_t state_len, const void *unread, size_t *unread_len)
{
	size_t rest = s->unread_len - s->unread_off;
	unsigned char *mem = (unsigned char *)malloc(state_len + *unread_len + rest + 1);

	if (mem && state_len > 0)
		memcpy(mem, state, state_len);
	if (mem && *unread_len > 0)
		memcpy(mem + state_len, unread, *unread_len);
	if (mem && rest > 0)
		memcpy(mem + state_len + *unread_len, s->unread + s->unread_off, rest);
	*unread_len += rest;
	return mem;
}

/* Allocates the record of a session without a state. Returns 0 or -1. */
static inline int weir_spare_(struct weir_handoff *h)
{
	struct weir_note_ *note = h->spare;

	if (note)
		return 0;
	note = (struct weir_note_ *)calloc(1, sizeof(*note));
	if (note)
		note->mem = (unsigned char *)malloc(1);
	if (!note || !note->mem) {
		free(note);
		return weir_fail_(h, "weir: no memory");
	}
	h->spare = note;
	return 0;
}

/* Records a session in its current state. Returns 0, or -1 without memory. */
static inline int weir_note_(struct weir_handoff *h, struct weir_session *s)
{
	struct weir_note_ *note;
	unsigned char *mem = NULL;
	size_t unread_len = 0;

	if (s->state_len + s->unread_len > 0) {
		mem = weir_pack_(s, s->state, s->state_len, NULL, &unread_len);
		if (!mem)
			return weir_fail_(h, "weir: no memory");
	}
	if (weir_spare_(h)) {
		free(mem);
		return -1;
	}
	note = h->spare;
	h->spare = NULL;
	if (mem) {
		free(note->mem);
		note->mem = mem;
	}
	note->state_len = s->state_len;
	note->unread_len = unread_len;
	note->session = s->id;
	note->fd = s->fd;
	note->read = s->read;
	note->written = s->written;
	note->next = h->notes;
	note->at = &h->notes;
	if (note->next)
		note->next->at = &note->next;
	h->notes = s->note = note;
	return 0;
}

static inline void weir_forget_(struct weir_note_ *note)
{
	*note->at = note->next;
	if (note->next)
		note->next->at = note->at;
	free(note->mem);
	free(note);
}

/* Returns the record of a session by number, NULL if it is closed or has moved. */
static inline struct weir_note_ *weir_noted_(struct weir_handoff *h, uint64_t session)
{
	struct weir_note_ *note = h->notes;

	while (note && note->session != session)
		note = note->next;
	return note;
}

static inline unsigned char *weir_copy_(const void *b, size_t n)
{
	unsigned char *out = (unsigned char *)malloc(n + 1);

	if (out && n > 0)
		memcpy(out, b, n);
	return out;
}

static inline struct weir_message_ weir_message_of_(unsigned int type, uint64_t session,
						    unsigned int number)
{
	struct weir_message_ m;

	memset(&m, 0, sizeof(m));
	m.type = type;
	m.session = session;
	m.number = number;
	m.fd = -1;
	return m;
}

/* Accepts a session from the keeper and queues it for weir_handoff_accept(). */
static inline void weir_given__(struct weir_handoff *h, struct weir_message_ *m)
{
	struct weir_given_ *g = (struct weir_given_ *)calloc(1, sizeof(*g));
	struct weir_note_ *before = weir_noted_(h, m->session);
	struct weir_message_ answer;
	struct weir_session *s = g ? &g->session : NULL;
	uint64_t read_at = m->read, written_at = m->written;
	int ok = g && m->number == WEIR_STREAM_ && m->fd >= 0 && !weir_begin_(s, m->fd);

	if (before)
		before->cut = 0; /* it had moved and now comes back from its new owner */
	/* Our listener comes back from a newer process that died before it was ready. */
	if (m->number == WEIR_LISTENER_ && h->listener >= 0 && m->session == h->listener_id &&
	    !h->replaced) {
		answer = weir_message_of_(WEIR_TOOK_, m->session, 0);
		weir_send_(h, &answer);
		if (m->fd >= 0)
			close(m->fd);
		free(g);
		return;
	}
	if (ok && weir_positions_(m->fd, &read_at, &written_at)) {
		read_at = m->read; /* closed by the peer: recv will report it */
		written_at = m->written;
	}
	if (ok) {
		s->received = 1;
		s->crashed = !!(m->flags & WEIR_CRASHED_);
		s->read = m->read;
		s->written = m->written;
		s->replay = written_at - m->written;
		s->state = weir_copy_(m->state, m->state_len);
		s->state_len = m->state_len;
		s->unread = weir_copy_(m->unread, m->unread_len);
		s->unread_len = m->unread_len;
	}
	ok = ok && (int64_t)(m->read - read_at) >= 0 && (int64_t)(written_at - m->written) >= 0 &&
	     s->state && s->unread && !weir_note_(h, s);
	if (ok && weir_discard_(m->fd, m->read - read_at)) {
		weir_forget_(s->note);
		ok = 0;
	}
	answer = weir_message_of_(ok ? WEIR_TOOK_ : WEIR_REFUSE_, m->session, ok ? 0 : WEIR_LOST_);
	if (ok) {
		s->note->kept = h->generation;
		s->note->has = m->state_len + m->unread_len;
	} else
		answer.text = m->cut			? WEIR_NO_DESCRIPTORS_ :
			      m->number == WEIR_STREAM_ ? "it cannot continue here" :
							  "no socket for it here";
	answer.text_len = ok ? 0 : strlen(answer.text);
	weir_send_(h, &answer);
	if (!ok) {
		if (m->fd >= 0)
			close(m->fd);
		if (g)
			weir_free_(s);
		free(g);
		return;
	}
	*h->last = g;
	h->last = &g->next;
}

/* Queues an order to move a session, because the caller may be using it. */
static inline void weir_ordered_(struct weir_handoff *h, const struct weir_message_ *m)
{
	struct weir_order_ *o = (struct weir_order_ *)calloc(1, sizeof(*o));

	if (!o || !h->move || m->name_len >= sizeof(o->to)) {
		free(o);
		return;
	}
	o->session = m->session;
	memcpy(o->to, m->name, m->name_len);
	*h->last_order = o;
	h->last_order = &o->next;
}

/* Makes the caller carry out the queued orders. */
static inline void weir_obey_(struct weir_handoff *h)
{
	struct weir_order_ *o;

	while ((o = h->orders)) {
		h->orders = o->next;
		if (!h->orders)
			h->last_order = &h->orders;
		h->move(h, o->session, o->to);
		free(o);
	}
}

/* Reports whether the caller has a session of its own. */
static inline int weir_serves_(const struct weir_handoff *h)
{
	const struct weir_note_ *note = h->notes;

	while (note && note->moved)
		note = note->next;
	return note != NULL;
}

/* Returns the number of a Ready message. A replaced member has sessions to hand over and gets none. */
static inline unsigned int weir_readiness_(const struct weir_handoff *h)
{
	unsigned int yes = h->move ? 3 : 1;

	if (h->proving || (h->replaced && weir_serves_(h)))
		return h->standby ? yes | WEIR_READY_STANDBY_ : 0;
	return h->replaced ? 0 : yes;
}

static inline void weir_listens_(struct weir_handoff *h, int yes)
{
	struct epoll_event e;

	memset(&e, 0, sizeof(e));
	e.events = EPOLLIN;
	if (h->listener >= 0)
		epoll_ctl(h->epoll, yes ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, h->listener, &e);
}

static inline int weir_keep_listener_(struct weir_handoff *h)
{
	struct weir_session s;
	struct weir_message_ m;

	if (h->listener < 0 || h->proving || h->replaced) /* it belongs to the newer process */
		return 0;
	if (weir_begin_(&s, h->listener))
		return weir_fail_(h, "weir: the listener is not a plain TCP socket");
	m = weir_message_of_(WEIR_KEEP_, s.id, WEIR_LISTENER_);
	m.text = h->label;
	m.text_len = strlen(h->label);
	m.fd = h->listener;
	return weir_send_(h, &m);
}

/*
 * Handles a newer process being ready. This one stands by: it accepts nothing, hands its sessions
 * over, and serves returned sessions. That ends when the other has proved itself, dies or hangs:
 * see weir_prove_().
 */
static inline void weir_stand_by_(struct weir_handoff *h)
{
	struct weir_message_ m;

	if (h->replaced)
		return;
	if (!h->proving)
		weir_listens_(h, 0);
	if (!h->standby) {
		h->replaced = 1;
		return;
	}
	h->again = weir_now_();
	h->proof = h->again + (h->proof_ms > 0 ? h->proof_ms : WEIR_PROOF_MS_);
	h->pause = WEIR_TRY_MS_;
	if (h->proving) /* an even newer one */
		return;
	h->proving = 1;
	m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
	weir_send_(h, &m);
}

/* Handles a message that is not an answer. */
static inline void weir_heard_(struct weir_handoff *h, struct weir_message_ *m)
{
	struct weir_note_ *note;

	if (m->type == WEIR_GIVE_)
		weir_given__(h, m);
	else if (m->fd >= 0)
		close(m->fd);
	if (m->type == WEIR_ERROR_) {
		weir_fail_(h, "weir: %.*s", (int)m->text_len, m->text);
		note = weir_noted_(h, m->session);
		if (note && m->number == WEIR_OWNED_) {
			note->moved = 1; /* another process claimed it first at this keeper */
			note->cut = 0;
		} else if (note) {
			note->refused = 1;
			note->has = 0;
		}
	}
	if (m->type == WEIR_LIMITS_) { /* all later messages obey the new limits */
		struct weir_message_ agree = weir_message_of_(WEIR_AGREE_, 0, m->number);

		h->max_state = (size_t)m->read;
		weir_send_(h, &agree);
	}
	if (m->type == WEIR_MOVE_)
		weir_ordered_(h, m);
	if (m->type == WEIR_REPLACED_)
		weir_stand_by_(h);
	if (m->type == WEIR_ALONE_ && h->proving) { /* continue */
		h->proving = 0;
		weir_listens_(h, 1);
		weir_keep_listener_(h); /* this keeper may not have it */
	}
	if (m->type == WEIR_GIVE_ || m->type == WEIR_MOVE_ || m->type == WEIR_REPLACED_ ||
	    m->type == WEIR_ALONE_) {
		/* This may happen during a commit or a transfer. A poll of conn no longer shows the
		 * message. */
		h->woken = 1;
		weir_timer_(h);
	}
	free(m->mem);
}

/* Handles the received messages without waiting, also the last ones of an exited keeper. */
static inline void weir_drain_(struct weir_handoff *h)
{
	struct weir_message_ m;

	while (h->conn >= 0 && weir_receive_(h, &m, 0) > 0)
		weir_heard_(h, &m);
}

/* Sends a request with an answer. Returns 0 or -1. */
static inline int weir_ask_(struct weir_handoff *h, struct weir_message_ *m)
{
	m->seq = ++h->seq ? h->seq : ++h->seq;
	return weir_send_(h, m);
}

/* Waits for the answer to a request. The caller frees its mem. Returns 0 or -1. */
static inline int weir_answered_(struct weir_handoff *h, const struct weir_message_ *m,
				 struct weir_message_ *answer)
{
	int64_t end = weir_now_() + WEIR_TIMEOUT_MS_;
	int n;

	for (;;) {
		n = weir_receive_(h, answer, end);
		if (n < 0)
			return -1;
		if (n == 0) {
			weir_lost_keeper_(h);
			return weir_fail_(h, "weir: the keeper does not answer");
		}
		if (answer->seq != m->seq) {
			weir_heard_(h, answer);
			continue;
		}
		if (answer->cut) { /* an answer to Find: the socket stays for the predecessor or the next process */
			weir_heard_(h, answer);
			errno = EMFILE;
			return weir_fail_(h, "weir: " WEIR_NO_DESCRIPTORS_);
		}
		if (answer->type != WEIR_ERROR_)
			return 0;
		weir_fail_(h, "weir: %.*s", (int)answer->text_len, answer->text);
		h->code = answer->number;
		free(answer->mem);
		return -1;
	}
}

static inline int weir_call_(struct weir_handoff *h, struct weir_message_ *m,
			     struct weir_message_ *answer)
{
	return weir_ask_(h, m) ? -1 : weir_answered_(h, m, answer);
}

/* Reports whether the keeper accepts the size of a session. A size it already has from a time with
 * a larger limit is fine, too. */
static inline int weir_fits_(const struct weir_handoff *h, const struct weir_note_ *note)
{
	size_t size = note->state_len + note->unread_len;

	return size <= h->max_state || (note->kept == h->generation && size <= note->has);
}

/* Stores a commit at the keeper. Returns 0 or -1. */
static inline int weir_keep_(struct weir_handoff *h, struct weir_note_ *note)
{
	struct weir_message_ m = weir_message_of_(WEIR_COMMIT_, note->session, 0), answer;

	if (!weir_fits_(h, note))
		weir_drain_(h); /* the keeper may have raised its limit */
	if (note->moved) {
		weir_fail_(h, "weir: another process owns the session");
		h->code = WEIR_OWNED_;
		return -1;
	}
	if (h->conn < 0)
		return weir_fail_(h, "weir: no keeper answers on %s", h->socket);
	if (!weir_fits_(h, note)) {
		note->refused = 1;
		weir_fail_(h, "weir: %zu bytes of state and unread; this keeper keeps at most %zu",
			   note->state_len + note->unread_len, h->max_state);
		h->code = WEIR_LIMIT_;
		return -1;
	}
	m.read = note->read;
	m.written = note->written;
	m.state = note->mem;
	m.state_len = note->state_len;
	m.unread = note->mem + note->state_len;
	m.unread_len = note->unread_len;
	if (note->kept != h->generation || note->refused) { /* a new session, or a new keeper */
		m.type = WEIR_KEEP_;
		m.number = WEIR_STREAM_;
		m.text = h->label;
		m.text_len = strlen(h->label);
		m.fd = note->fd;
	}
	note->kept = h->generation;
	note->has = note->state_len + note->unread_len;
	if (!note->refused)
		return weir_send_(h, &m);
	if (weir_call_(h, &m, &answer)) { /* after a rejection the caller gets the result at once */
		note->moved = h->code == WEIR_OWNED_;
		note->has = 0;
		return -1;
	}
	free(answer.mem);
	note->refused = 0;
	return 0;
}

/*
 * Makes the keeper release a session after an interrupted transfer. If another process owns it, the
 * keeper refuses. If the keeper had rejected the transfer, this process would otherwise own the
 * session for its whole life, and nobody would serve it. Only the keeper's duplicate is closed. A
 * session given to another process by an earlier keeper continues. Returns 0, or -1 without a
 * keeper. The next keeper is asked then.
 */
static inline int weir_let_go_(struct weir_handoff *h, struct weir_note_ *note)
{
	struct weir_message_ m = weir_message_of_(WEIR_DROP_, note->session, 0);
	int failed;

	if (!note->cut)
		return 0;
	note->moved = note->refused = 0;
	note->kept = h->generation - 1;
	failed = weir_keep_(h, note) || weir_send_(h, &m);
	note->moved = 1;
	if (failed && h->code != WEIR_LIMIT_) /* a session over the limit is not kept either */
		return -1;
	note->cut = 0;
	return 0;
}

/* Ends a session already closed by the caller. */
static inline void weir_release_(struct weir_note_ *note)
{
	close(note->fd);
	weir_forget_(note);
}

/* Gives a new keeper all sessions as of their last commits. */
static inline int weir_keep_all_(struct weir_handoff *h)
{
	struct weir_note_ *note, *next;

	for (note = h->notes; note; note = next) {
		next = note->next;
		if (note->over) {
			if (weir_let_go_(h, note))
				return -1;
			weir_release_(note);
			continue;
		}
		note->refused = 0;
		weir_keep_(h, note);
		weir_drain_(h);
		if (h->conn < 0)
			return -1;
	}
	return 0;
}

/* Reports whether the process at path is trusted. It must belong to root, this user, the user
 * number in the environment variable env, or the owner of the socket's directory. Anyone can bind
 * an abstract name. Sets *uid to its user. */
static inline int weir_believes_(int fd, const char *path, const char *env, unsigned int *uid)
{
	struct {
		int pid;
		unsigned int uid, gid;
	} peer; /* struct ucred; glibc requires _GNU_SOURCE for it */
	socklen_t length = sizeof(peer);
	const char *number = getenv(env), *slash = strrchr(path, '/');
	char *end, dir[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
	struct stat st;
	size_t n;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) || length != sizeof(peer))
		return 0;
	*uid = peer.uid;
	if (peer.uid == 0 || peer.uid == (unsigned int)geteuid())
		return 1;
	if (number && *number && strtoul(number, &end, 10) == peer.uid && !*end)
		return 1;
	if (*path == '@')
		return 0;
	n = slash ? (size_t)(slash - path) : 0;
	if (n >= sizeof(dir))
		return 0;
	memcpy(dir, path, n);
	strcpy(dir + n, !slash ? "." : n ? "" : "/");
	return !stat(dir, &st) && (unsigned int)st.st_uid == peer.uid;
}

/* Connects within a time (0: at once) and sends Hello. weir_welcomed_() handles the answer. */
static inline int weir_hello_(struct weir_handoff *h, int wait_ms)
{
	struct weir_message_ m =
		weir_message_of_(WEIR_HELLO_, 0, (h->move ? 6 : 4) | WEIR_STANDBY_);
	struct weir_note_ *note, *next;
	struct timeval limit;
	struct epoll_event e;
	unsigned int uid = 0;
	int dead;

	memset(&limit, 0, sizeof(limit));
	memset(&e, 0, sizeof(e));
	limit.tv_sec = wait_ms / 1000;
	e.events = EPOLLIN;
	h->conn = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | (wait_ms ? 0 : SOCK_NONBLOCK), 0);
	if (h->conn < 0 || setsockopt(h->conn, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) ||
	    epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->conn, &e) ||
	    connect(h->conn, (struct sockaddr *)&h->keeper, h->keeper_len)) {
		dead = errno == ECONNREFUSED || errno == ENOENT;
		weir_fail_(h, "weir: no keeper answers on %s: %s", h->socket, strerror(errno));
		weir_lost_keeper_(h);
		for (note = h->notes; dead && note; note = next) {
			next = note->next;
			if (note->over) /* no other owner can exist */
				weir_release_(note);
		}
		return -1;
	}
	if (!weir_believes_(h->conn, h->socket, "WEIR_HANDOFF_UID", &uid)) {
		weir_fail_(h,
			   "weir: %s: user %u answers there, neither root nor this user: set "
			   "$WEIR_HANDOFF_UID to its number if that is right",
			   h->socket, uid);
		weir_lost_keeper_(h);
		return -1;
	}
	m.seq = ++h->seq ? h->seq : ++h->seq;
	m.text = h->service;
	m.text_len = strlen(h->service);
	m.name = h->name;
	m.name_len = strlen(h->name);
	if (weir_send_(h, &m)) {
		weir_lost_keeper_(h);
		return -1;
	}
	h->hello = h->conn;
	h->conn = -1;
	h->hello_end = weir_now_() + WEIR_TIMEOUT_MS_;
	return 0;
}

/* Waits for the answer to Hello until end, and gives the keeper all sockets. Returns 0 or -1. */
static inline int weir_welcomed_(struct weir_handoff *h, int64_t end)
{
	struct weir_message_ m, answer;
	int n;

	h->conn = h->hello;
	h->hello = -1;
	n = weir_receive_(h, &m, end);
	if (n == 0) {
		h->hello = h->conn; /* a hanging keeper: do not wait for it */
		h->conn = -1;
		if (weir_left_(h->hello_end) == 0)
			weir_lost_keeper_(h);
		return weir_fail_(h, "weir: the keeper does not answer");
	}
	if (n < 0)
		return -1;
	if (m.type != WEIR_WELCOME_) {
		weir_fail_(h, "weir: %.*s", (int)m.text_len, m.text);
		h->code = m.type == WEIR_ERROR_ ? m.number : 0;
		free(m.mem);
		weir_lost_keeper_(h);
		return -1;
	}
	h->max_state = (size_t)m.read;
	h->standby = !!(m.number & WEIR_STANDBY_);
	h->generation++;
	weir_timer_(h);
	free(m.mem);
	if (!h->ready)
		return 0;
	m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
	/* The answer follows all errors about sessions. */
	if (weir_keep_listener_(h) || weir_keep_all_(h) || weir_call_(h, &m, &answer))
		return -1;
	free(answer.mem);
	return 0;
}

/*
 * Reconnects to a keeper at intervals. It does not wait for the answer to Hello. An answering
 * keeper gets all sockets, with the timeouts of weir_send_() and weir_answered_().
 */
static inline void weir_reconnect_(struct weir_handoff *h)
{
	uint64_t ticks;

	if (h->broken)
		weir_drain_(h);
	if (h->conn >= 0)
		return;
	while (read(h->timer, &ticks, sizeof(ticks)) < 0 && errno == EINTR)
		;
	if (h->hello < 0 && weir_left_(h->retry) > 0)
		return;
	if (h->hello >= 0 || !weir_hello_(h, 0))
		weir_welcomed_(h, 0);
}

/*
 * Leaves the service. Open sessions and the listener are for the next process. Sessions must not be
 * used afterwards.
 */
static inline void weir_handoff_stop(struct weir_handoff *h)
{
	struct weir_message_ m = weir_message_of_(WEIR_LEAVE_, 0, 0);
	struct weir_given_ *g;
	struct weir_order_ *o;

	if (h->conn >= 0)
		weir_send_(h, &m);
	if (h->spare)
		free(h->spare->mem);
	free(h->spare);
	h->spare = NULL;
	while ((o = h->orders)) {
		h->orders = o->next;
		free(o);
	}
	while (h->notes)
		if (h->notes->over)
			weir_release_(h->notes);
		else
			weir_forget_(h->notes);
	while ((g = h->given)) {
		h->given = g->next;
		close(g->session.fd);
		weir_free_(&g->session);
		free(g);
	}
	h->last = &h->given;
	h->last_order = &h->orders;
	weir_lost_keeper_(h);
	if (h->timer >= 0)
		close(h->timer);
	if (h->epoll >= 0)
		close(h->epoll);
	if (h->listener >= 0)
		close(h->listener);
	h->epoll = h->timer = h->listener = -1;
}

/*
 * Is weir_handoff_stop() for a service that ends for good. The keeper also releases the listener,
 * so its port is free at once. Open sessions end. To keep them, transfer them first.
 */
static inline void weir_handoff_forget(struct weir_handoff *h)
{
	struct weir_message_ m = weir_message_of_(WEIR_DROP_, h->listener_id, 0);
	struct weir_note_ *note;

	if (h->listener >= 0 && !h->proving && !h->replaced && h->conn >= 0)
		weir_send_(h, &m);
	for (note = h->notes; note && h->conn >= 0; note = note->next) {
		m.session = note->session;
		if (!note->moved && note->kept == h->generation)
			weir_send_(h, &m);
	}
	weir_handoff_stop(h);
}

/*
 * Joins a service as the member of a name. keeper is the keeper's socket, NULL for
 * $WEIR_HANDOFF_SOCKET or the default. Returns 0, or -1 with the reason in h->error. Then nothing
 * is open.
 */
static inline int weir_handoff_init(struct weir_handoff *h, const char *service, const char *name,
				    const char *keeper)
{
	struct epoll_event e;

	memset(h, 0, sizeof(*h));
	h->conn = h->hello = h->listener = h->epoll = h->timer = -1;
	h->last = &h->given;
	h->last_order = &h->orders;
	if (!keeper)
		keeper = getenv("WEIR_HANDOFF_SOCKET");
	if (!keeper || !*keeper)
		keeper = WEIR_HANDOFF_SOCKET;
	if (!*service || !*name || strlen(service) > WEIR_NAME_ || strlen(name) > WEIR_NAME_ ||
	    strlen(keeper) >= sizeof(h->socket))
		return weir_fail_(
			h,
			"weir: the name of the service, the member or the socket is empty or too long");
	strcpy(h->service, service);
	strcpy(h->socket, keeper);
	strcpy(h->name, name);
	h->keeper.sun_family = AF_UNIX;
	strcpy(h->keeper.sun_path, keeper);
	h->keeper_len = sizeof(h->keeper);
	if (*keeper == '@') { /* an abstract name begins with 0 and has an explicit length */
		h->keeper.sun_path[0] = '\0';
		h->keeper_len =
			(socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(keeper));
	}
	h->epoll = epoll_create1(EPOLL_CLOEXEC);
	h->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	memset(&e, 0, sizeof(e));
	e.events = EPOLLIN;
	if (h->epoll < 0 || h->timer < 0 || epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->timer, &e))
		weir_fail_(h, "weir: epoll, timerfd: %s", strerror(errno));
	else if (!weir_hello_(h, WEIR_TIMEOUT_MS_) &&
		 !weir_welcomed_(h, weir_now_() + WEIR_TIMEOUT_MS_))
		return 0;
	weir_handoff_stop(h); /* nothing stays open; error and code remain */
	return -1;
}

/* Returns the predecessor's listener by its label, with its queued connections, or -1. */
static inline int weir_handoff_find(struct weir_handoff *h, const char *label)
{
	struct weir_message_ m = weir_message_of_(WEIR_FIND_, 0, WEIR_LISTENER_), answer, took;

	m.text = label;
	m.text_len = strlen(label);
	if (m.text_len >= sizeof(h->label) || weir_call_(h, &m, &answer))
		return -1;
	took = weir_message_of_(WEIR_TOOK_, answer.session, 0);
	weir_send_(h, &took);
	free(answer.mem);
	return answer.fd;
}

/*
 * Starts to receive sessions: new connections of a listening socket (-1: none) and sessions of
 * other members. label distinguishes the socket from others of this member. An older process of
 * this name is told to hand over its sessions. Returns 0 or -1.
 */
static inline int weir_handoff_start(struct weir_handoff *h, int listener, const char *label)
{
	struct weir_message_ m, answer;
	struct epoll_event e;

	memset(&e, 0, sizeof(e));
	e.events = EPOLLIN;
	h->listener = listener;
	if (listener >= 0) {
		socklen_t len = sizeof(h->listener_id);

		getsockopt(listener, SOL_SOCKET, SO_COOKIE, &h->listener_id, &len);
	}
	snprintf(h->label, sizeof(h->label), "%s", label ? label : "");
	if (listener >= 0 && epoll_ctl(h->epoll, EPOLL_CTL_ADD, listener, &e))
		return weir_fail_(h, "weir: the listener: %s", strerror(errno));
	h->ready = 1;
	m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
	if (weir_keep_listener_(h) || weir_call_(h, &m, &answer))
		return -1;
	free(answer.mem);
	return 0;
}

/*
 * Does the work of a member on standby: hands sessions over and checks the newer process's proof.
 * The keeper decides about the proof. It sets h->replaced when all sessions are with the newer
 * process or have ended. Without h->move the caller hands the sessions over afterwards.
 */
static inline void weir_prove_(struct weir_handoff *h)
{
	struct weir_message_ m = weir_message_of_(WEIR_READY_, 0, WEIR_READY_ENDS_), answer;
	int proved;

	weir_timer_(h);
	if (h->move && weir_left_(h->again) == 0 && weir_serves_(h)) {
		h->again = weir_now_() + h->pause;
		h->pause = h->pause < WEIR_TRY_LAST_MS_ / 2 ? 2 * h->pause : WEIR_TRY_LAST_MS_;
		h->move(h, 0, h->name);
	}
	if (!h->proving || h->conn < 0 || h->given)
		return;
	if (!h->standby) { /* an older keeper has started meanwhile */
		h->proving = 0;
		h->replaced = 1;
		return;
	}
	if (weir_left_(h->proof) > 0 || (h->move && weir_serves_(h)) || weir_call_(h, &m, &answer))
		return;
	proved = answer.number == 0;
	free(answer.mem);
	if (!proved || !h->proving)
		return;
	if (weir_serves_(h)) { /* a session has come back or is still here */
		m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
		weir_send_(h, &m);
		if (h->move)
			return;
	}
	h->proving = 0;
	h->replaced = 1;
}

/* Reports whether an error of weir_handoff_accept() is a lack of descriptors or memory. */
static inline int weir_handoff_short(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* Returns a descriptor, readable when weir_handoff_accept() has work to do. */
static inline int weir_handoff_fd(const struct weir_handoff *h)
{
	return h->epoll;
}

/* Reports whether accept(2) failed for lack of descriptors although no connection waits. The kernel
 * allocates the descriptor first. */
static inline int weir_idle_(int listener)
{
	struct pollfd p;
	int error = errno, ready;

	if (!weir_handoff_short(error))
		return 0;
	p.fd = listener;
	p.events = POLLIN;
	ready = poll(&p, 1, 0);
	errno = error;
	return ready == 0;
}

/*
 * Waits for a session, new or from another member. Returns 1 with s filled in, 0 after timeout_ms
 * milliseconds (-1: no limit), or -1 with errno:
 *
 * - ECANCELED: this process is replaced (h->replaced). A newer process of this name has proved
 *   itself. With h->move set it also has all sessions not ended here. Otherwise the caller
 *   transfers them now. The next call returns each rejected one.
 * - EINTR after a signal.
 * - EMFILE, ENFILE, ENOBUFS and ENOMEM (weir_handoff_short): the connection still waits, and
 *   weir_handoff_fd() stays readable. Call again a little later.
 * - All other errors of accept(2), except EAGAIN and ECONNABORTED.
 */
static inline int weir_handoff_accept(struct weir_handoff *h, struct weir_session *s,
				      int timeout_ms)
{
	int64_t end = timeout_ms < 0 ? -1 : weir_now_() + timeout_ms;
	struct epoll_event e;
	struct weir_given_ *g;
	int fd, left;

	for (;;) {
		weir_drain_(h);
		g = h->given;
		if (g) {
			*s = g->session;
			h->given = g->next;
			if (!h->given)
				h->last = &h->given;
			free(g);
			return 1;
		}
		weir_obey_(h); /* the caller now has all earlier sessions */
		if (h->given)  /* meanwhile */
			continue;
		if (h->woken) {
			h->woken = 0;
			weir_timer_(h);
		}
		if (h->proving) {
			weir_prove_(h);
			if (h->given || h->woken)
				continue;
		}
		if (h->replaced) {
			weir_reconnect_(
				h); /* the next keeper needs sessions not yet handed over, too */
			errno = ECANCELED;
			return weir_fail_(h, "weir: replaced by a newer process");
		}
		if (weir_spare_(h)) { /* before a connection without a record */
			errno = ENOMEM;
			return -1;
		}
		errno = EAGAIN;
		fd = h->listener < 0 || h->proving ? -1 : accept(h->listener, NULL, NULL);
		if (fd >= 0) {
			fcntl(fd, F_SETFD, FD_CLOEXEC);
			if (weir_begin_(s, fd) || weir_positions_(fd, &s->read, &s->written)) {
				close(fd);
				continue;
			}
			weir_note_(h, s); /* its memory is already allocated */
			weir_keep_(h, s->note);
			return 1;
		}
		if (errno != EAGAIN && errno != ECONNABORTED && !weir_idle_(h->listener))
			return weir_fail_(h, "weir: accept: %s", strerror(errno));
		weir_reconnect_(h);
		left = weir_left_(end);
		if (left == 0)
			return 0;
		if (epoll_wait(h->epoll, &e, 1, left) < 0)
			return weir_fail_(h, "weir: waiting: %s", strerror(errno));
	}
}

/*
 * Copies the head of the receive queue. A peek stops at an urgent byte. Since Linux 6.9 another one
 * can begin there. On older kernels the bytes before it must be committed first.
 */
static inline ssize_t weir_peek_(int fd, void *b, size_t n)
{
	ssize_t got, more;
	int queued, tries = 0;

	do
		got = recv(fd, b, n, MSG_PEEK | MSG_DONTWAIT);
	while (got < 0 && errno == EAGAIN && weir_at_mark_(fd, &tries));
	while (got > 0 && (size_t)got < n && !ioctl(fd, FIONREAD, &queued) && queued > got &&
	       !weir_peek_off_(fd, (int)got)) {
		more = recv(fd, (char *)b + got, n - (size_t)got, MSG_PEEK | MSG_DONTWAIT);
		weir_peek_off_(fd, -1);
		if (more > 0)
			got += more;
		else if (more == 0 || errno != EINTR)
			break; /* the next call reports the error */
	}
	return got;
}

/*
 * Returns the bytes after the last commit and leaves them in the socket. As recv(2), it returns 0
 * at the end, and -1 with EAGAIN without data. Commit before the next call, or it returns the same
 * bytes again.
 */
static inline ssize_t weir_session_recv(struct weir_session *s, void *b, size_t n)
{
	ssize_t got;

	if (s->note->moved) {
		errno = ESTALE;
		return -1;
	}
	if (s->unread_off < s->unread_len) {
		if (n > s->unread_len - s->unread_off)
			n = s->unread_len - s->unread_off;
		memcpy(b, s->unread + s->unread_off, n);
		s->unread_off += n;
		return (ssize_t)n;
	}
	got = weir_peek_(s->fd, b, n);
	if (got > 0)
		s->seen = (size_t)got;
	return got;
}

/*
 * Returns the number of bytes for weir_session_recv() that are not in the socket, so poll does not
 * show them. A received session may have such bytes until they are read. Serve each session
 * returned by weir_handoff_accept() at once.
 */
static inline size_t weir_session_pending(const struct weir_session *s)
{
	return s->unread_len - s->unread_off;
}

/* Is like send(2). Bytes written by a predecessor after its last commit are not sent twice. */
static inline ssize_t weir_session_send(struct weir_session *s, const void *b, size_t n)
{
	ssize_t sent;

	if (s->note->moved) {
		errno = ESTALE;
		return -1;
	}
	if (s->replay > 0) {
		sent = (ssize_t)(n < s->replay ? n : s->replay);
		s->replay -= (uint64_t)sent;
	} else {
		sent = send(s->fd, b, n, MSG_NOSIGNAL | MSG_DONTWAIT);
	}
	if (sent > 0)
		s->written += (uint64_t)sent;
	return sent;
}

/*
 * Commits: state accounts for all bytes returned by weir_session_recv() and sent by
 * weir_session_send(), except the last bytes received. These are an incomplete message, and the
 * caller has them in unread. The committed bytes are taken out of the socket, and the caller keeps
 * unread.
 *
 * Returns 0, or -1 if the session is not kept. Then the keeper has exited or rejects the commit.
 * h->code 7 means over a limit, for example larger than h->max_state. The session continues in any
 * case. The next accepted commit keeps it again. The next commit also reports a later rejection.
 */
static inline int weir_handoff_commit(struct weir_handoff *h, struct weir_session *s,
				      const void *state, size_t state_len, const void *unread,
				      size_t unread_len)
{
	struct weir_note_ *note = s->note;
	unsigned char *mem = weir_pack_(s, state, state_len, unread, &unread_len);
	size_t seen = s->seen;
	int kept;

	if (!mem)
		return weir_fail_(h, "weir: no memory");
	if (!note->moved) {
		free(note->mem);
		note->mem = mem;
		note->state_len = state_len;
		note->unread_len = unread_len;
		note->read = s->read += seen;
		note->written = s->written;
		s->seen = 0;
		weir_reconnect_(h); /* it may find that the session has moved */
	} else {
		free(mem);
	}
	kept = weir_keep_(h, note);
	if (note->moved) {
		errno = ESTALE;
		return -1;
	}
	if (s->unread_off == s->unread_len)
		weir_free_(s);
	/* The keeper comes first, because bytes taken out of the socket are nowhere else. */
	if (weir_discard_(s->fd, seen))
		return weir_fail_(h, "weir: another process has read from the session");
	return kept;
}

/* Releases a session in this process. */
static inline void weir_end_(struct weir_session *s)
{
	weir_forget_(s->note);
	s->note = NULL;
	close(s->fd);
	s->fd = -1;
	weir_free_(s);
}

/*
 * Transfers a session to a member by name ("": the ready member with the fewest sessions), with a
 * state as for weir_handoff_commit(). On 0 the other member owns it, and s is invalid. On -1 it
 * stays here, with one exception: errno ESTALE means that the keeper exited meanwhile. The other
 * member may own it then, so only close it. A new keeper first gets the session itself.
 */
static inline int weir_handoff_transfer(struct weir_handoff *h, struct weir_session *s,
					const char *to, const void *state, size_t state_len,
					const void *unread, size_t unread_len)
{
	struct weir_message_ m, answer;
	unsigned char *mem;
	int failed;

	if (strlen(to) > WEIR_NAME_)
		return weir_fail_(h, "weir: invalid member name");
	weir_drain_(h); /* may find that the keeper has exited */
	m = weir_message_of_(WEIR_TRANSFER_, s->id, 0);
	if (h->conn < 0 && (h->hello >= 0 || !weir_hello_(h, 0)))
		weir_welcomed_(h, weir_now_() + WEIR_PATIENCE_MS_);
	if (s->note->moved) {
		errno = ESTALE;
		return weir_fail_(h, "weir: another process owns the session");
	}
	mem = weir_pack_(s, state, state_len, unread, &unread_len);
	if (!mem)
		return weir_fail_(h, "weir: no memory");
	m.name = to;
	m.name_len = strlen(to);
	m.read = s->read + s->seen;
	m.written = s->written;
	m.state = mem;
	m.state_len = state_len;
	m.unread = mem + state_len;
	m.unread_len = unread_len;
	failed = weir_ask_(h, &m);
	free(mem);
	errno = 0;
	if (!failed && weir_answered_(h, &m, &answer)) {
		failed = -1;
		s->note->cut = h->conn < 0;
		s->note->moved = s->note->cut || h->code == WEIR_OWNED_;
		errno = s->note->moved ? ESTALE : 0;
	}
	if (failed)
		return -1;
	free(answer.mem);
	weir_end_(s);
	return 0;
}

/*
 * Ends a session for good, or only this process's part of a moved one. After an interrupted
 * transfer only a keeper knows the owner. Without a keeper, the next one is asked as soon as it
 * starts.
 */
static inline void weir_session_close(struct weir_handoff *h, struct weir_session *s)
{
	struct weir_message_ m = weir_message_of_(WEIR_DROP_, s->id, 0);

	if (!s->note->moved) {
		weir_discard_(s->fd, s->seen); /* unread bytes would cause a reset */
		shutdown(s->fd, SHUT_WR);
		if (s->note->kept == h->generation && h->conn >= 0)
			weir_send_(h, &m);
	} else if (weir_let_go_(h, s->note)) {
		s->note->over = 1;
		s->note = NULL;
		s->fd = -1;
		weir_free_(s);
		return;
	}
	weir_end_(s);
}

#ifdef __cplusplus
}
#endif

#endif
