// SPDX-License-Identifier: Apache-2.0

// Package bpf holds steer's programs, and the Go by which bpf2go loads them.
package bpf

// The prefix /usr/include/ARCH is where Debian keeps asm/types.h; -idirafter lets both stand.
//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type service -type peer_key -type peer -type generation Steer steer.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type event Watch watch.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Reuse reuse.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type member Groups groups.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type bind_key -type bind_count Bind bind.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Copy copy.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Templates templates.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Inject inject.bpf.c
