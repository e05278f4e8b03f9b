/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * With this header the TCP sessions of a C or C++ server outlive its process. A keeper (weir serve,
 * weir handoff keep) has a duplicate of each connection; see docs/HANDOFF.md for what is promised.
 *
 *	struct weir_handoff h;
 *	struct weir_session s;
 *
 *	if (weir_handoff_init(&h, "telemetry", "0", NULL))
 *		errx(1, "%s", h.error);
 *	fd = weir_handoff_find(&h, "tcp :1790");	// of the process before; else -1:
 *	if (fd < 0)
 *		fd = my_listen(1790);
 *	weir_handoff_start(&h, fd, "tcp :1790");
 *	for (;;)
 *		if (weir_handoff_accept(&h, &s, -1) > 0)	// or poll weir_handoff_fd(&h)
 *			serve(&s);
 *		else if (weir_handoff_short(errno))
 *			usleep(100000);		// until others have ended: what is to be accepted waits
 *		else if (errno != EINTR)
 *			break;			// ECANCELED: replaced
 *	weir_handoff_stop(&h);
 *
 * weir_handoff_transfer() gives a session to a member by name. For sessions that survive SIGKILL,
 * read with weir_session_recv(), write with weir_session_send(), and say after each read with
 * weir_handoff_commit() what your state accounts for. Sockets are non-blocking: other processes
 * share that flag. A session that is the caller's no more goes on elsewhere: recv, send and commit say
 * ESTALE; close it then. One thread at a time uses a struct weir_handoff. C99 (-std=gnu99, or _GNU_SOURCE)
 * and C++; needs no library.
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
/* For an answer, for a keeper that does not read, and between attempts to find one. */
enum { WEIR_TIMEOUT_MS_ = 5000, WEIR_PATIENCE_MS_ = 2000, WEIR_RETRY_MS_ = 250 };
/*
 * Of a member that is replaced: the default of proof_ms, between attempts to hand over the sessions that
 * came back, and between looks whether it may end.
 */
enum { WEIR_PROOF_MS_ = 1000, WEIR_TRY_MS_ = 2000, WEIR_TRY_LAST_MS_ = 60000, WEIR_LOOK_MS_ = 50 };
/* MFD_CLOEXEC | MFD_ALLOW_SEALING, F_ADD_SEALS, F_SEAL_*: the headers want _GNU_SOURCE for them. */
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

/* A connection. read and written are positions: bytes since the connection was made. */
struct weir_session {
	int fd;
	int received;  /* another process had it before */
	int crashed;   /* and died with it */
	uint64_t id;   /* SO_COOKIE */
	uint64_t read; /* taken out of the socket */
	uint64_t written;
	uint64_t replay; /* bytes to come that the kernel has taken already, from a predecessor */
	size_t seen;	 /* shown by weir_session_recv, not committed */
	unsigned char *state; /* as committed by the predecessor; NULL for a new one */
	size_t state_len;
	unsigned char *unread; /* what it had read and its state does not account for */
	size_t unread_len, unread_off;
	struct weir_note_ *note;
};

/*
 * What the next keeper is to know of a session: as it was committed last. It is the library's, on a
 * list of all sessions, until the session is closed or transferred: till then fd stays open.
 */
struct weir_note_ {
	uint64_t session, read, written;
	int fd;
	unsigned int kept;  /* by which connection to the keeper */
	int refused;	    /* the keeper has said no: the next commit asks */
	int moved;	    /* it is another process's, or may be */
	int cut;	    /* may be: the keeper went in the midst of its transfer */
	int over;	    /* of such a one: the caller has closed it, fd is the library's */
	unsigned char *mem; /* a copy of state, and behind it of unread */
	size_t state_len, unread_len;
	size_t has; /* bytes of both that this keeper has, as far as is known */
	struct weir_note_ *next, **at;
};

struct weir_message_ {
	unsigned int type, flags, seq, number;
	uint64_t session, read, written;
	const char *name, *text;
	size_t name_len, text_len;
	const void *state, *unread;
	size_t state_len, unread_len;
	int fd;		    /* sent, or received and the receiver's; -1: none */
	int cut;	    /* received without its descriptors: this process may have no more */
	unsigned char *mem; /* received: state and unread are in here */
};

struct weir_given_ {
	struct weir_session session;
	struct weir_given_ *next;
};

/* That a session is to go to a member. */
struct weir_order_ {
	uint64_t session;
	char to[64];
	struct weir_order_ *next;
};

struct weir_handoff {
	/*
	 * Set it between weir_handoff_init() and weir_handoff_start() if sessions are to move when
	 * others want it: weir handoff send, a change of steering. weir_handoff_accept() calls it
	 * with the number of a session (id; 0: all) and the name of a member ("": any), for it to
	 * call weir_handoff_transfer(). What that refuses stays. When a newer process of this name is
	 * ready, weir_handoff_accept() calls it with 0 and that name, and again for sessions that come
	 * back.
	 */
	void (*move)(struct weir_handoff *h, uint64_t session, const char *to);
	void *arg; /* the caller's own */
	/*
	 * How long a newer process has to live before this one is told that it is replaced, in
	 * milliseconds, if not 1000. Set it before weir_handoff_start().
	 */
	int proof_ms;

	int conn;     /* -1: no keeper */
	int broken;   /* it has ended: conn is read to its end, for what it has said before */
	int hello;    /* a connection whose Hello is not answered yet; -1: none */
	int listener; /* -1: none */
	uint64_t listener_id;
	int epoll;
	int timer; /* in epoll: wakes the caller while there is no keeper, and once if woken */
	int woken; /* something for weir_handoff_accept() was heard that is not in conn any more */
	int replaced; /* a newer process of this name has proved itself: hand over, and end */
	int ready;
	int standby; /* the keeper knows members that stand by */
	int proving; /* a newer process is ready and has to prove itself: this one accepts nothing */
	int64_t proof,
		again; /* it has to live until then; the next attempt to hand sessions over */
	int pause;     /* to the one after that, in ms */
	unsigned int seq, generation;
	size_t max_state; /* as the keeper says, also while it runs */
	char service[64], name[64], label[256];
	char socket[108]; /* the keeper's, as it was said */
	struct sockaddr_un keeper;
	socklen_t keeper_len;
	int64_t retry, hello_end; /* when to try again, and to give an attempt up */
	struct weir_given_ *given, **last;
	struct weir_order_ *orders, **last_order;
	struct weir_note_ *notes;
	struct weir_note_ *spare; /* for the connection that is accepted next */
	char error[512];	  /* why the last call has failed */
	unsigned int code;	  /* the protocol's, where the keeper refuses: 7 over a limit */
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

/* Milliseconds, by a clock that nobody sets. */
static inline int64_t weir_now_(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* The time until end, for poll; end -1: there is none. */
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

/* A sealed memfd with state and unread, for what does not fit a message. */
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
 * Makes weir_handoff_fd() readable every so often while there is no keeper or this member stands by, and
 * at once if woken.
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

/* Without a keeper sessions go on, and are not kept; see weir_reconnect_(). */
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
 * Sends a message: 0, or -1 if no keeper takes it: one that does not read counts as gone. Of one that
 * has ended, what it has said is heard first: a session that it has given is in conn and nowhere else.
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
			return weir_fail_(h, "weir: %zu bytes of state into a memfd: %s",
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

/* Takes the state of a message out of its memfd, the last descriptor, to behind name and text. */
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
 * Receives a message: 1, 0 if there is none by end (0: now), -1 if the keeper has gone. The caller
 * frees mem.
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
	if (!m->mem) { /* no answer may be taken for another: begin anew */
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
	 * A signal may interrupt either call, again and again: neither begins the time anew. That the
	 * keeper has ended with something unread is said once, and before what it has sent.
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
	/* Fewer descriptors than there is room for: the message is whole, and can be refused. */
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
	if (cut && !bad) { /* which of them is there? */
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
	return weir_fail_(h, "weir: the keeper on %s has gone", h->socket);
}

/* Asks the kernel how far a connection has come: 0, or -1 for one that is closed. */
static inline int weir_positions_(int fd, uint64_t *read_at, uint64_t *written_at)
{
	/* tcpi_state, tcpi_bytes_acked, tcpi_bytes_received of linux/tcp.h: glibc's header may lack them. */
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
 * Whether to read again after EAGAIN: a read that begins at an urgent byte fails with it where a signal
 * is pending, though bytes are there. tries bounds it: kTLS says EAGAIN there every time.
 */
static inline int weir_at_mark_(int fd, int *tries)
{
	int at = 0, queued = 0;

	return ++*tries <= 100 && !ioctl(fd, SIOCATMARK, &at) && at &&
	       !ioctl(fd, FIONREAD, &queued) && queued > 0;
}

/* Throws away n bytes of the receive queue, which are there. */
static inline int weir_discard_(int fd, uint64_t n)
{
	char none[16384]; /* kTLS writes to it in spite of MSG_TRUNC; TCP alone does not: tcp(7) */
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

/* Has peeks begin off bytes behind the queue's begin; -1: at it. 0, or -1 before Linux 6.9. */
static inline int weir_peek_off_(int fd, int off)
{
	return setsockopt(fd, SOL_SOCKET, WEIR_PEEK_OFF_, &off, sizeof(off));
}

/*
 * Fills in what the kernel says of a new connection. An urgent byte (MSG_OOB) is one of the stream:
 * else the kernel counts it as received, and no read returns it. Connections have the option of their
 * listener.
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

/* state, and behind it what it does not account for: unread, then what is not shown yet. */
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

/* Has memory for the note of a session without a state: 0, or -1. */
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

/* Remembers a session from here on, as it stands: 0, or -1 without memory. */
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

/* The note of a session by its number; NULL: it has been closed, or has moved. */
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

/* Takes a session that the keeper gives, and queues it for weir_handoff_accept(). */
static inline void weir_given__(struct weir_handoff *h, struct weir_message_ *m)
{
	struct weir_given_ *g = (struct weir_given_ *)calloc(1, sizeof(*g));
	struct weir_note_ *before = weir_noted_(h, m->session);
	struct weir_message_ answer;
	struct weir_session *s = g ? &g->session : NULL;
	uint64_t read_at = m->read, written_at = m->written;
	int ok = g && m->number == WEIR_STREAM_ && m->fd >= 0 && !weir_begin_(s, m->fd);

	if (before)
		before->cut = 0; /* it had moved: now it comes from whoever had it */
	/* Our listener comes back from a newer process that has found it and died before it was ready. */
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
		read_at = m->read; /* closed by the peer: reading will say so */
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
			      m->number == WEIR_STREAM_ ? "it cannot be gone on with" :
							  "nobody here goes on with it";
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

/* Notes that a session is to move: the caller may be in the middle of something with it. */
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

/* Has the caller move what is to move. */
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

/* Whether the caller has a session that is its own. */
static inline int weir_serves_(const struct weir_handoff *h)
{
	const struct weir_note_ *note = h->notes;

	while (note && note->moved)
		note = note->next;
	return note != NULL;
}

/* The number of Ready. One that is replaced has sessions to hand over, and is to get none. */
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

	if (h->listener < 0 || h->proving || h->replaced) /* it is the newer process's */
		return 0;
	if (weir_begin_(&s, h->listener))
		return weir_fail_(h, "weir: the listener is no plain TCP socket");
	m = weir_message_of_(WEIR_KEEP_, s.id, WEIR_LISTENER_);
	m.text = h->label;
	m.text_len = strlen(h->label);
	m.fd = h->listener;
	return weir_send_(h, &m);
}

/*
 * A newer process is ready. This one stands by: it accepts nothing, hands its sessions over, and serves
 * those that come back, until the other has proved itself, or has died or hangs: see weir_prove_().
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
	if (h->proving) /* a yet newer one */
		return;
	h->proving = 1;
	m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
	weir_send_(h, &m);
}

/* Deals with a message that is no answer. */
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
			note->moved = 1; /* another was quicker to say so to this keeper */
			note->cut = 0;
		} else if (note) {
			note->refused = 1;
			note->has = 0;
		}
	}
	if (m->type == WEIR_LIMITS_) { /* what is sent from here on keeps to them */
		struct weir_message_ agree = weir_message_of_(WEIR_AGREE_, 0, m->number);

		h->max_state = (size_t)m->read;
		weir_send_(h, &agree);
	}
	if (m->type == WEIR_MOVE_)
		weir_ordered_(h, m);
	if (m->type == WEIR_REPLACED_)
		weir_stand_by_(h);
	if (m->type == WEIR_ALONE_ && h->proving) { /* go on */
		h->proving = 0;
		weir_listens_(h, 1);
		weir_keep_listener_(h); /* this keeper may not have it */
	}
	if (m->type == WEIR_GIVE_ || m->type == WEIR_MOVE_ || m->type == WEIR_REPLACED_ ||
	    m->type == WEIR_ALONE_) {
		/* Perhaps amidst a commit or a transfer: a poll does not see it in conn any more. */
		h->woken = 1;
		weir_timer_(h);
	}
	free(m->mem);
}

/* Hears what the keeper has said, to the end of one that has ended, and waits for nothing. */
static inline void weir_drain_(struct weir_handoff *h)
{
	struct weir_message_ m;

	while (h->conn >= 0 && weir_receive_(h, &m, 0) > 0)
		weir_heard_(h, &m);
}

/* Sends a request that wants an answer: 0 or -1. */
static inline int weir_ask_(struct weir_handoff *h, struct weir_message_ *m)
{
	m->seq = ++h->seq ? h->seq : ++h->seq;
	return weir_send_(h, m);
}

/* Waits for the answer to a request, whose mem the caller frees: 0 or -1. */
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
		if (answer->cut) { /* of Find: the socket is for the process before, or the next */
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

/* Whether the keeper keeps so much of a session: also what it has already, of a time with a larger limit. */
static inline int weir_fits_(const struct weir_handoff *h, const struct weir_note_ *note)
{
	size_t size = note->state_len + note->unread_len;

	return size <= h->max_state || (note->kept == h->generation && size <= note->has);
}

/* Has the keeper note where a session stands: 0 or -1. */
static inline int weir_keep_(struct weir_handoff *h, struct weir_note_ *note)
{
	struct weir_message_ m = weir_message_of_(WEIR_COMMIT_, note->session, 0), answer;

	if (!weir_fits_(h, note))
		weir_drain_(h); /* the keeper may have said that its limit is larger now */
	if (note->moved) {
		weir_fail_(h, "weir: the session is another process's");
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
	if (note->kept != h->generation || note->refused) { /* a new one, or the keeper is */
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
	if (weir_call_(h, &m,
		       &answer)) { /* after a refusal the caller hears at once whether it fits */
		note->moved = h->code == WEIR_OWNED_;
		note->has = 0;
		return -1;
	}
	free(answer.mem);
	note->refused = 0;
	return 0;
}

/*
 * Has the keeper let go of a session whose transfer was cut off, unless another has it: then it
 * refuses both. If it had refused the transfer, the session would be this process's for as long as
 * that lives, and nobody would serve it. Only the keeper's duplicate is closed: what the other was
 * given by a keeper before goes on. 0, or -1 without a keeper: the next one is to be asked.
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
	if (failed && h->code != WEIR_LIMIT_) /* what is over the limit is not kept either */
		return -1;
	note->cut = 0;
	return 0;
}

/* Ends what the caller has closed already. */
static inline void weir_release_(struct weir_note_ *note)
{
	close(note->fd);
	weir_forget_(note);
}

/* Gives a new keeper all sessions as they were committed last. */
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

/* Whether root, this user, the user (a number) in the environment variable env, or the owner of the
 * socket's directory answers at path: everybody can take an abstract name. Sets *uid to who does. */
static inline int weir_believes_(int fd, const char *path, const char *env, unsigned int *uid)
{
	struct {
		int pid;
		unsigned int uid, gid;
	} peer; /* struct ucred, for which glibc wants _GNU_SOURCE */
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

/* Connects, within a time (0: at once), and says hello. The answer is for weir_welcomed_(). */
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
			if (note->over) /* nothing lives that may have it for us */
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

/* Hears the answer to hello by end, and gives the keeper what there is. 0 or -1. */
static inline int weir_welcomed_(struct weir_handoff *h, int64_t end)
{
	struct weir_message_ m, answer;
	int n;

	h->conn = h->hello;
	h->hello = -1;
	n = weir_receive_(h, &m, end);
	if (n == 0) {
		h->hello = h->conn; /* a keeper that stands still: nobody waits for it */
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
	/* The answer comes behind what the keeper has against any session. */
	if (weir_keep_listener_(h) || weir_keep_all_(h) || weir_call_(h, &m, &answer))
		return -1;
	free(answer.mem);
	return 0;
}

/*
 * Looks for a keeper that has gone, every now and then. It does not wait for one to answer; one that
 * has is given everything, and is waited for as in weir_send_() and weir_answered_().
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
 * Leaves the service: sessions that are not closed, and the listener, are for the next process. No
 * session may be touched after it.
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
 * weir_handoff_stop() for a service that ends for good: the keeper lets go of the listener, too, whose
 * port is free at once, and sessions that are not closed end. Transfer those that another member is to
 * have first.
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
 * Joins a service as the member of a name; keeper is the keeper's socket, NULL for
 * $WEIR_HANDOFF_SOCKET or the default. 0, or -1 and h->error says why: then nothing is open.
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
	if (*keeper == '@') { /* an abstract name has its own length, and begins with 0 */
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
	weir_handoff_stop(h); /* nothing is left open; error and code stay */
	return -1;
}

/* The listener of the process before, by its label, with the connections queued on it; or -1. */
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
 * Begins to take sessions: new connections of a listening socket (-1: none), whose label tells it
 * from others of this member, and those of other members. An older process of this name is
 * told to hand over what it has. 0 or -1.
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
 * What a member that stands by does: hands sessions over, and sees whether the newer process has proved
 * itself, which the keeper judges. Then h->replaced is set, once all sessions are the other's or have
 * ended. Without h->move the caller is the one that hands over, after that.
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
	if (!h->standby) { /* this keeper came meanwhile, and is an older one */
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
	if (weir_serves_(
		    h)) { /* a session has come back, or is still to be handed over: may come back */
		m = weir_message_of_(WEIR_READY_, 0, weir_readiness_(h));
		weir_send_(h, &m);
		if (h->move)
			return;
	}
	h->proving = 0;
	h->replaced = 1;
}

/* Whether an error of weir_handoff_accept() is that the system or this process is short of something. */
static inline int weir_handoff_short(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* Readable when weir_handoff_accept() has something to do. */
static inline int weir_handoff_fd(const struct weir_handoff *h)
{
	return h->epoll;
}

/* Whether accept(2) is short of descriptors, which it asks for first, and nothing is to be accepted. */
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
 * Waits for a session, new or another member's: 1 and s is filled in, 0 after timeout_ms
 * milliseconds (-1: no limit), else -1 and errno: ECANCELED when this process is replaced
 * (h->replaced): a newer process of this name has proved itself, and, if h->move is set, has all sessions
 * that did not end here. Else the caller transfers them now; one that the other does not take comes back
 * by the next call. EINTR after a signal, and what accept(2) says but for EAGAIN and ECONNABORTED. With
 * EMFILE, ENFILE, ENOBUFS and ENOMEM (weir_handoff_short) the connection still waits: call again, a
 * little later, as weir_handoff_fd() stays readable.
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
		weir_obey_(h); /* now that the caller has all that came before */
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
				h); /* what is not handed over yet is for the next keeper, too */
			errno = ECANCELED;
			return weir_fail_(h, "weir: replaced by a newer process");
		}
		if (weir_spare_(h)) { /* before a connection is accepted that could not be noted */
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
			weir_note_(h, s); /* which has its memory */
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
 * Copies the receive queue's head. A peek stops at an urgent byte, and one that begins there goes on;
 * before Linux 6.9 none can, so that the bytes before it have to be committed first.
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
			break; /* the next call tells why */
	}
	return got;
}

/*
 * Shows what follows what is committed, and takes nothing: like recv(2), 0 at the end, -1 and EAGAIN
 * if there is nothing yet. Commit before the next call, or it shows the same again.
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
 * How many bytes weir_session_recv() has that are not in the socket, so that no poll tells of them: of
 * a received session, until they are shown. Serve a session that weir_handoff_accept() returns at once.
 */
static inline size_t weir_session_pending(const struct weir_session *s)
{
	return s->unread_len - s->unread_off;
}

/* Like send(2). What a predecessor has written after its last commit is not sent twice. */
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
 * Says that state accounts for all that weir_session_recv() has shown and weir_session_send() has
 * sent so far, but for the last bytes shown: those of a message that is not complete, which the
 * caller has in unread. They are taken out of the socket; the caller keeps them. 0, or -1 if the
 * session is not kept (the keeper has gone, or refuses: h->code 7 is over a limit, as is what is
 * larger than h->max_state): it goes on all the same, and is kept again from the next commit on that
 * the keeper takes. What the keeper refuses later than this returns, the next commit says.
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
		weir_reconnect_(h); /* which may find that it has moved */
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
	/* The keeper first: what is taken out of the socket is nowhere else. */
	if (weir_discard_(s->fd, seen))
		return weir_fail_(h, "weir: somebody else has read from the session");
	return kept;
}

/* Lets go of a session here. */
static inline void weir_end_(struct weir_session *s)
{
	weir_forget_(s->note);
	s->note = NULL;
	close(s->fd);
	s->fd = -1;
	weir_free_(s);
}

/*
 * Gives a session to a member by name ("": whoever is ready and has the fewest), with a state, as for
 * weir_handoff_commit(). 0: it is the other's, and s is no more. -1: it is still ours; but if the
 * keeper has gone meanwhile, errno is ESTALE: the other may have it, and all that is left is to close
 * it. A keeper that is new is given the session first.
 */
static inline int weir_handoff_transfer(struct weir_handoff *h, struct weir_session *s,
					const char *to, const void *state, size_t state_len,
					const void *unread, size_t unread_len)
{
	struct weir_message_ m, answer;
	unsigned char *mem;
	int failed;

	if (strlen(to) > WEIR_NAME_)
		return weir_fail_(h, "weir: no member can have this name");
	weir_drain_(h); /* or hears that the keeper has gone */
	m = weir_message_of_(WEIR_TRANSFER_, s->id, 0);
	if (h->conn < 0 && (h->hello >= 0 || !weir_hello_(h, 0)))
		weir_welcomed_(h, weir_now_() + WEIR_PATIENCE_MS_);
	if (s->note->moved) {
		errno = ESTALE;
		return weir_fail_(h, "weir: the session is another process's");
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
 * Ends a session for good; of one that has moved, this process's part alone. Whether one whose transfer
 * was cut off has moved, only a keeper knows: without one that is asked as soon as one is there.
 */
static inline void weir_session_close(struct weir_handoff *h, struct weir_session *s)
{
	struct weir_message_ m = weir_message_of_(WEIR_DROP_, s->id, 0);

	if (!s->note->moved) {
		weir_discard_(s->fd, s->seen); /* unread bytes would make it a reset */
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
