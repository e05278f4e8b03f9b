// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of BFD, their headers and their generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -no-global-types -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type bfd_setup -type bfd_state -type bfd_event -type bfd_from -type bfd_clockwork -type bfd_echo Bfd bfd.bpf.c

// Object is the compiled object.
func Object() []byte { return _BfdBytes }
