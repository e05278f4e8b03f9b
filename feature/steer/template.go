// SPDX-License-Identifier: Apache-2.0

package steer

//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" templates templates.bpf.c
//go:generate go tool bpf2go -tags linux -cflags "-O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" inject inject.bpf.c
