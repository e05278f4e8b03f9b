/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * This header lets a collector register itself for a slot of a service steered by weir:
 *
 *	char error[256];
 *	if (weir_register("telemetry", 0, 30000, error, sizeof(error)))
 *		fprintf(stderr, "%s\n", error);
 *
 * Call it when the sockets are bound and the program is ready to serve. The kernel withdraws the
 * slot when the process exits, so there is nothing to undo. weir serve must run as root, as this
 * process's user, as the owner of the socket's directory, or as the user number in
 * $WEIR_REGISTER_UID. Requires C99 or C++ and no library.
 */
#ifndef WEIR_H
#define WEIR_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The registration socket of weir serve, unless $WEIR_REGISTER_SOCKET names another path. */
#define WEIR_REGISTER_SOCKET "/run/weir/register.sock"

/* With -std=c99 glibc has no SO_PEERCRED. */
#if defined(SO_PEERCRED)
#define WEIR_SO_PEERCRED_ SO_PEERCRED
#elif defined(__powerpc__)
#define WEIR_SO_PEERCRED_ 21
#elif defined(__mips__) || defined(__alpha__)
#define WEIR_SO_PEERCRED_ 18
#elif defined(__sparc__)
#define WEIR_SO_PEERCRED_ 0x40
#elif defined(__hppa__)
#define WEIR_SO_PEERCRED_ 0x4011
#else
#define WEIR_SO_PEERCRED_ 17
#endif

/* Reports whether the process at path is trusted. It must belong to root, this user, the user
 * number in the environment variable env, or the owner of the socket's directory. Anyone can bind
 * an abstract name. Sets *uid to its user. */
static inline int weir_register_believes_(int fd, const char *path, const char *env,
					  unsigned int *uid)
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

	if (getsockopt(fd, SOL_SOCKET, WEIR_SO_PEERCRED_, &peer, &length) || length != sizeof(peer))
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

/* Returns the connected socket, or -1 with errno set. */
static inline int weir_connect_(const char *path, int timeout_ms)
{
	struct sockaddr_un to;
	struct timeval limit;
	unsigned int uid = 0;
	int fd, saved;

	memset(&to, 0, sizeof(to));
	to.sun_family = AF_UNIX;
	if (strlen(path) >= sizeof(to.sun_path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(to.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	/* weir's own timeout ends first, and its answer names the missing parts. */
	limit.tv_sec = timeout_ms / 1000 + 2;
	limit.tv_usec = timeout_ms % 1000 * 1000;
	if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) ||
	    connect(fd, (const struct sockaddr *)&to, sizeof(to))) {
		saved = errno;
		close(fd);
		errno = saved;
		return -1;
	}
	if (!weir_register_believes_(fd, path, "WEIR_REGISTER_UID", &uid)) {
		close(fd);
		errno = EPERM; /* another user's process answers: see WEIR_REGISTER_UID */
		return -1;
	}
	return fd;
}

/* Sends the request and reads the whole answer. Returns its length, or -1 with errno set. */
static inline ssize_t weir_exchange_(int fd, const char *request, size_t length, char *answer,
				     size_t size)
{
	size_t done = 0;
	ssize_t n;

	while (done < length) {
		n = send(fd, request + done, length - done, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		done += (size_t)n;
	}
	for (done = 0; done + 1 < size; done += (size_t)n) {
		n = recv(fd, answer + done, size - 1 - done, 0);
		if (n < 0 && errno == EINTR) {
			n = 0;
			continue;
		}
		if (n < 0)
			return -1;
		if (n == 0)
			break;
	}
	answer[done] = '\0';
	return (ssize_t)done;
}

/*
 * Registers the calling process as the member of a slot. Returns 0 when the slot's traffic reaches
 * the process. It waits up to timeout_ms milliseconds for missing sockets. On failure it returns -1
 * and writes the reason to error, unless that is NULL.
 */
static inline int weir_register(const char *service, int slot, int timeout_ms, char *error,
				size_t size)
{
	char body[256], request[512], answer[1024], *text;
	const char *path = getenv("WEIR_REGISTER_SOCKET");
	int fd, length, total, status = 0;
	ssize_t n;

	if (!error)
		size = 0;
	if (!path || !*path)
		path = WEIR_REGISTER_SOCKET;
	if (strlen(service) > 63 || strcspn(service, "&=%+# \r\n") != strlen(service)) {
		snprintf(error, size, "weir: no service can have this name");
		return -1;
	}
	length = snprintf(body, sizeof(body), "service=%s&slot=%d&timeout_ms=%d", service, slot,
			  timeout_ms);
	total = snprintf(request, sizeof(request),
			 "POST /v1/register HTTP/1.0\r\nHost: weir\r\n"
			 "Content-Type: application/x-www-form-urlencoded\r\n"
			 "Content-Length: %d\r\n\r\n%s",
			 length, body);
	fd = weir_connect_(path, timeout_ms);
	if (fd < 0) {
		if (errno == EPERM)
			snprintf(
				error, size,
				"weir: %s: another user answers there, neither root nor this user: "
				"set $WEIR_REGISTER_UID to its number if that is right",
				path);
		else
			snprintf(error, size, "weir: no weir serve answers on %s: %s", path,
				 strerror(errno));
		return -1;
	}
	n = weir_exchange_(fd, request, (size_t)total, answer, sizeof(answer));
	if (n < 0)
		snprintf(error, size, "weir: %s: %s", path, strerror(errno));
	close(fd);
	if (n < 0)
		return -1;
	text = strstr(answer, "\r\n\r\n");
	if (sscanf(answer, "HTTP/%*d.%*d %d", &status) != 1 || !text) {
		snprintf(error, size, "weir: %s: no answer of weir serve's", path);
		return -1;
	}
	if (status == 200)
		return 0;
	text += 4;
	text[strcspn(text, "\r\n")] = '\0';
	snprintf(error, size, "weir: %s", text);
	return -1;
}

#ifdef __cplusplus
}
#endif

#endif
