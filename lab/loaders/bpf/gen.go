// SPDX-License-Identifier: Apache-2.0

// Package bpf holds programs passing every packet, compiled from pass.bpf.c.
package bpf

// To compile: clang-14, libbpf-dev, linux-libc-dev. The objects are committed; a build needs Go alone.

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Pass pass.bpf.c

// Object returns the compiled file, for file-based loaders.
func Object() []byte { return _PassBytes }
