// SPDX-License-Identifier: Apache-2.0

// Package bpf has a BPF program for many decisions of the guard in one run, and its generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type guard_entry Batch batch.bpf.c
