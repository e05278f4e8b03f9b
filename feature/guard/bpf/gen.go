// SPDX-License-Identifier: Apache-2.0

// Package bpf has the BPF programs of the guard, their headers and their generated Go.
package bpf

// -mcpu=v3: compare-and-swap on a word of a map (Linux 5.12).
//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type guard_state -type guard_limits -type guard_target_key -type guard_target -type guard_listen_key -type guard_listen -type guard_top_entry Guard guard.bpf.c
//go:generate go run ./image . ../../../clients/go/guard

// Object returns the compiled object.
func Object() []byte { return _GuardBytes }
