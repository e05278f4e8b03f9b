// SPDX-License-Identifier: Apache-2.0

package steer

// The prefix /usr/include/ARCH is where Debian keeps asm/types.h; -idirafter lets both stand.
//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type service -type peer_key -type peer -type generation steer steer.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type event watch watch.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" reuse reuse.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type member groups groups.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type bind_key -type bind_count bind bind.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" copy copy.bpf.c
