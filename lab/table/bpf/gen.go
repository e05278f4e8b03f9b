// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF program to measure lookups, and its generated Go.
package bpf

// Debian keeps asm/types.h in /usr/include/ARCH; -idirafter permits both architectures.
//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Bench bench.bpf.c
