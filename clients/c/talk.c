/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An example server in C, with sessions that can move at any time and survive SIGKILL. It answers
 * each message of 7 bytes with 8 bytes, the hash of all messages so far. weir's tests use it, too.
 *
 *	talk KEEPER NAME PORT [PROOF_MS]
 */
#include "weir_handoff.h"

#include <arpa/inet.h>

enum { QUESTION = 7, ANSWER = 8, SESSIONS = 64 };

/* The state of a session, besides its socket. */
struct talk {
	struct weir_session session;
	uint64_t hash, count;
	unsigned char partial[QUESTION];
	size_t partial_len;
	unsigned char out[65536]; /* not sent yet */
	size_t out_len;
};

static struct talk *talks[SESSIONS];
static struct weir_handoff h;

static uint64_t fnv(uint64_t hash, const unsigned char *question)
{
	unsigned char all[8 + QUESTION];
	uint64_t x = 14695981039346656037u;
	size_t i;

	weir_put_(all, hash, 8);
	memcpy(all + 8, question, QUESTION);
	for (i = 0; i < sizeof(all); i++)
		x = (x ^ all[i]) * 1099511628211u;
	return x;
}

static size_t state_of(const struct talk *t, unsigned char *b)
{
	weir_put_(b, t->hash, 8);
	weir_put_(b + 8, t->count, 8);
	return 16;
}

static void forget(int i)
{
	free(talks[i]);
	talks[i] = NULL;
}

static void flush(struct talk *t)
{
	ssize_t n = weir_session_send(&t->session, t->out, t->out_len);

	if (n > 0) {
		memmove(t->out, t->out + n, t->out_len - (size_t)n);
		t->out_len -= (size_t)n;
	}
}

/* Answers the received messages. Returns 0, or -1 at the end of the session. */
static int answer(struct talk *t)
{
	unsigned char b[QUESTION + 3000], state[16];
	ssize_t n;
	size_t at;

	flush(t);
	if (t->out_len > 0)
		return 0; /* the peer does not read, so stop reading, too */
	memcpy(b, t->partial, t->partial_len);
	n = weir_session_recv(&t->session, b + t->partial_len, sizeof(b) - t->partial_len);
	if (n < 0) /* also ESTALE: another process owns it */
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	if (n == 0)
		return -1;
	n += (ssize_t)t->partial_len;
	for (at = 0; at + QUESTION <= (size_t)n; at += QUESTION) {
		t->hash = fnv(t->hash, b + at);
		t->count++;
		weir_put_(t->out + t->out_len, t->hash, 8);
		t->out_len += ANSWER;
	}
	t->partial_len = (size_t)n - at;
	memcpy(t->partial, b + at, t->partial_len);
	/* The state covers the answers as sent, so send all of them before the commit. */
	while (t->out_len > 0) {
		struct pollfd p = { t->session.fd, POLLOUT, 0 };

		flush(t);
		if (t->out_len > 0 &&
		    (poll(&p, 1, 10000) <= 0 || (p.revents & (POLLERR | POLLHUP))))
			return -1;
	}
	weir_handoff_commit(&h, &t->session, state, state_of(t, state), t->partial, t->partial_len);
	return 0;
}

static int take(const struct weir_session *s)
{
	struct talk *t = calloc(1, sizeof(*t));
	int i;

	for (i = 0; i < SESSIONS && talks[i]; i++)
		;
	if (!t || i == SESSIONS)
		exit(1);
	talks[i] = t;
	t->session = *s;
	t->hash = 14695981039346656037u;
	if (s->state_len >= 16) {
		t->hash = weir_get_(s->state, 8);
		t->count = weir_get_(s->state + 8, 8);
	}
	return i;
}

/* An order: the name of the member to receive all sessions. */
static void order(char *to)
{
	unsigned char state[16];
	int i, moved = 0, failed = 0;

	to[strcspn(to, "\n")] = '\0';
	for (i = 0; i < SESSIONS; i++) {
		struct talk *t = talks[i];

		if (!t)
			continue;
		if (weir_handoff_transfer(&h, &t->session, to, state, state_of(t, state),
					  t->partial, t->partial_len)) {
			fprintf(stderr, "talk: %s\n", h.error);
			failed++;
			continue;
		}
		forget(i);
		moved++;
	}
	printf("moved %d, failed %d\n", moved, failed);
	fflush(stdout);
}

/* Carries out weir handoff send, or a change of steering. */
static void move(struct weir_handoff *me, uint64_t session, const char *to)
{
	unsigned char state[16];
	int i;

	for (i = 0; i < SESSIONS; i++) {
		struct talk *t = talks[i];

		if (!t || (session != 0 && t->session.id != session))
			continue;
		if (!weir_handoff_transfer(me, &t->session, to, state, state_of(t, state),
					   t->partial, t->partial_len))
			forget(i);
		else
			fprintf(stderr, "talk: %s\n", me->error);
	}
}

static int listen_on(int port)
{
	struct sockaddr_in a;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

	memset(&a, 0, sizeof(a));
	a.sin_family = AF_INET;
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	a.sin_port = htons((uint16_t)port);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 100)) {
		perror("talk: listen");
		exit(1);
	}
	return fd;
}

int main(int argc, char **argv)
{
	struct weir_session s;
	char label[64], line[256];
	int fd, i, n, got, scarce = 0;

	if (argc < 4 || argc > 5 || weir_handoff_init(&h, "talk", argv[2], argv[1])) {
		fprintf(stderr, "talk: %s\n",
			argc < 4 || argc > 5 ? "want KEEPER NAME PORT [PROOF_MS]" : h.error);
		return 1;
	}
	h.move = move;
	h.proof_ms = argc > 4 ? atoi(argv[4]) : 0;
	snprintf(label, sizeof(label), "tcp 127.0.0.1:%s", argv[3]);
	fd = weir_handoff_find(&h, label);
	if (weir_handoff_start(&h, fd >= 0 ? fd : listen_on(atoi(argv[3])), label)) {
		fprintf(stderr, "talk: %s\n", h.error);
		return 1;
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		struct pollfd p[SESSIONS + 2];
		int who[SESSIONS + 2];

		/* Without descriptors, waiting connections would make each poll return at once. */
		p[0].fd = scarce ? -1 : weir_handoff_fd(&h);
		p[1].fd = STDIN_FILENO;
		p[0].events = p[1].events = POLLIN;
		for (i = 0, n = 2; i < SESSIONS; i++)
			if (talks[i]) {
				who[n] = i;
				p[n].fd = talks[i]->session.fd;
				p[n++].events = (short)(talks[i]->out_len > 0 ? POLLOUT : POLLIN);
			}
		if (poll(p, (nfds_t)n, scarce ? 100 : 1000) < 0)
			return 1;
		for (i = 2; i < n; i++)
			if (answer(talks[who[i]])) {
				weir_session_close(&h, &talks[who[i]]->session);
				forget(who[i]);
			}
		if (p[1].revents && !fgets(line, sizeof(line), stdin))
			break;
		if (p[1].revents)
			order(line);
		while ((got = weir_handoff_accept(&h, &s, 0)) > 0) {
			i = take(&s);
			n = 0;
			while (n == 0 && weir_session_pending(&talks[i]->session) > 0 &&
			       talks[i]->out_len == 0)
				n = answer(talks[i]); /* the socket does not show these bytes */
			if (n) {
				weir_session_close(&h, &talks[i]->session);
				forget(i);
			}
		}
		scarce = got < 0 && weir_handoff_short(errno);
		if (got < 0 && !scarce && errno != EINTR && !h.replaced) {
			fprintf(stderr, "talk: %s\n", h.error);
			break;
		}
		if (h.replaced) {
			strcpy(line, argv[2]);
			order(line);
			break;
		}
	}
	weir_handoff_stop(&h);
	return 0;
}
