// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of protection, their headers and their generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -no-global-types -cflags "-mcpu=v3 -O2 -g -Wall -Werror -Wno-unused-function -I../.. -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type reroute_repair -type reroute_path -type reroute_prefix -type reroute_tally Protect protect.bpf.c

// Object is the compiled object.
func Object() []byte { return _ProtectBytes }
