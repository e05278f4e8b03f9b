// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of the backend's quarantine, their header and their generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type quarantine_key -type quarantine_pair -type quarantine_entry Quarantine quarantine.bpf.c

// Object returns the compiled object.
func Object() []byte { return _QuarantineBytes }
