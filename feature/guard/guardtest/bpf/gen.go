// SPDX-License-Identifier: Apache-2.0

// Package bpf holds a BPF program that runs many decisions of the guard at once, and its generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type guard_entry Batch batch.bpf.c
