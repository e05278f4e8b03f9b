/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A self-registering collector for slot 0 of the service telemetry. Build it by
 * cc -I../../clients/c collector.c
 *
 *	services:
 *	  telemetry:
 *	    listen: [udp 0.0.0.0:4739]
 *	    members: [{slot: 0, user: collector}]
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <weir.h>

int main(int argc, char **argv)
{
	struct sockaddr_in at;
	char packet[65535], error[256];
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	ssize_t n;

	memset(&at, 0, sizeof(at));
	at.sin_family = AF_INET;
	at.sin_port = htons((unsigned short)(argc > 1 ? atoi(argv[1]) : 4739));
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at))) {
		perror("socket");
		return 1;
	}
	if (weir_register("telemetry", 0, 30000, error, sizeof(error))) {
		fprintf(stderr, "%s\n", error);
		return 1;
	}
	puts("registered");
	fflush(stdout);
	while ((n = recv(fd, packet, sizeof(packet), 0)) >= 0) {
		printf("%zd bytes\n", n);
		fflush(stdout);
	}
	perror("recv");
	return 1;
}
