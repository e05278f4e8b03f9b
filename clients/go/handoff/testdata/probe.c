/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A member that obeys the orders on its standard input, line by line, and prints their results:
 *
 *	probe KEEPER NAME PORT
 *
 * probe.py is the same in Python. Sessions are numbered in the order of their arrival, from 0.
 */
#include <stdlib.h>

static int poor; /* of memory */

static void *scarce_calloc(size_t n, size_t size)
{
	return poor ? NULL : calloc(n, size);
}
#define calloc scarce_calloc
#include "weir_handoff.h"
#undef calloc

#include <arpa/inet.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

enum { SESSIONS = 64, STATE = 1 << 20 };

static struct weir_session sessions[SESSIONS];
static struct weir_handoff h;
static const char *keeper;
static unsigned char state[STATE], data[STATE];
static int count;
static int signals; /* one per this many microseconds during an order */

static void on_alarm(int signal)
{
	(void)signal;
}

/* Raises SIGALRM after first_us, and then every every_us. */
static void alarms(long first_us, long every_us)
{
	struct itimerval t;

	memset(&t, 0, sizeof(t));
	t.it_value.tv_sec = first_us / 1000000;
	t.it_value.tv_usec = first_us % 1000000;
	t.it_interval.tv_usec = every_us;
	setitimer(ITIMER_REAL, &t, NULL);
}

static const char *result(int n, int error)
{
	static char b[600];

	if (n >= 0)
		snprintf(b, sizeof(b), "%d", n);
	else
		snprintf(b, sizeof(b), "-1 %s",
			 error == EINTR	 ? "EINTR" :
			 error == EMFILE ? "EMFILE" :
			 error == ESTALE ? "ESTALE" :
					   h.error);
	return b;
}

static int open_files(void)
{
	int fd, n = 0;

	for (fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static int take(int timeout_ms)
{
	int n = weir_handoff_accept(&h, &sessions[count], timeout_ms);

	if (n > 0)
		count++;
	return n;
}

static int obey(const char *line)
{
	int64_t begin = weir_now_();
	char what[32] = "", to[64] = "";
	int a = 0, b = 0, n = 0, error;
	struct weir_session *s;

	sscanf(line, "%31s %d %d", what, &a, &b);
	s = &sessions[a % SESSIONS];
	if (signals)
		alarms(signals, signals);
	if (!strcmp(what, "accept")) { /* MS */
		n = take(a);
	} else if (!strcmp(what, "storm")) { /* MS: of signals, with accepts without a timeout */
		alarms(200, 200);
		while (weir_now_() < begin + a)
			take(0);
		alarms(0, 0);
	} else if (
		!strcmp(what,
			"alarmed")) { /* MS: signals after this time, during a wait without limit */
		/* repeatedly, because a stalled process may begin its wait after the first one */
		alarms(a * 1000L, 10000);
		n = take(-1);
		alarms(0, 0);
	} else if (!strcmp(what, "signals")) { /* MICROSECONDS: from now on, during every order */
		signals = a;
	} else if (!strcmp(what, "poor")) { /* 1: of memory; 0: no longer */
		poor = a;
	} else if (
		!strcmp(what,
			"failing")) { /* COUNT: joins without a keeper; prints the number of leaked descriptors */
		n = open_files();
		while (a-- > 0) {
			struct weir_handoff none;

			if (!weir_handoff_init(&none, "talk", a % 2 ? "x" : "a name with spaces",
					       a % 2 ? "/nonexistent" : keeper))
				return -1;
		}
		n = open_files() - n;
	} else if (!strcmp(what, "files")) { /* LIMIT: of descriptors */
		struct rlimit r = { (rlim_t)a, 4096 };

		n = setrlimit(RLIMIT_NOFILE, &r);
	} else if (!strcmp(what, "commit")) { /* SESSION BYTES */
		n = weir_handoff_commit(&h, s, state, (size_t)b, NULL, 0);
	} else if (!strcmp(what, "idle")) { /* MS: like a polling program */
		struct pollfd p = { weir_handoff_fd(&h), POLLIN, 0 };

		while (weir_left_(begin + a) > 0)
			if (poll(&p, 1, weir_left_(begin + a)) > 0)
				take(0);
	} else if (!strcmp(what, "flood")) { /* SESSION COMMITS: 0 if all commits are kept */
		for (; b > 0; b--)
			if (weir_handoff_commit(&h, s, state, 1000, NULL, 0))
				n = -1;
	} else if (!strcmp(what, "transfer")) { /* SESSION BYTES TO */
		sscanf(line, "%*s %*d %*d %63s", to);
		n = weir_handoff_transfer(&h, s, to, state, (size_t)b, NULL, 0);
	} else if (!strcmp(what, "recv")) { /* SESSION BYTES */
		n = (int)weir_session_recv(s, data, (size_t)b);
	} else if (!strcmp(what, "send")) { /* SESSION BYTES */
		n = (int)weir_session_send(s, data, (size_t)b);
	} else if (!strcmp(what, "forget")) { /* 0 */
		weir_handoff_forget(&h);
	} else if (!strcmp(what, "close")) { /* SESSION */
		weir_session_close(&h, s);
	} else {
		return -1;
	}
	error = errno;
	if (signals)
		alarms(0, 0);
	printf("%s %s %d ms\n", what, result(n, error), (int)(weir_now_() - begin));
	fflush(stdout);
	return 0;
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
		perror("probe: listen");
		exit(1);
	}
	return fd;
}

int main(int argc, char **argv)
{
	struct sigaction alarm_action;
	char label[64], line[256];
	int fd;

	if (argc != 4 || weir_handoff_init(&h, "talk", argv[2], argv[1])) {
		fprintf(stderr, "probe: %s\n", argc == 4 ? h.error : "want KEEPER NAME PORT");
		return 1;
	}
	keeper = argv[1];
	memset(&alarm_action, 0, sizeof(alarm_action));
	alarm_action.sa_handler = on_alarm;
	sigaction(SIGALRM, &alarm_action, NULL);
	snprintf(label, sizeof(label), "tcp 127.0.0.1:%s", argv[3]);
	fd = weir_handoff_find(&h, label);
	if (getenv("PROBE_FAILS")) /* simulates a failed deployment: before it is ready */
		return 1;
	if (weir_handoff_start(&h, fd >= 0 ? fd : listen_on(atoi(argv[3])), label)) {
		fprintf(stderr, "probe: %s\n", h.error);
		return 1;
	}
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin))
		if (obey(line)) {
			fprintf(stderr, "probe: %s", line);
			return 1;
		}
	weir_handoff_stop(&h);
	return 0;
}
