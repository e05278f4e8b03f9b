// SPDX-License-Identifier: Apache-2.0

// Package bpf holds programs that let everything pass: bpf2go compiles them from pass.bpf.c.
package bpf

// To compile: clang-14, libbpf-dev, linux-libc-dev. The objects are committed, building needs Go alone.

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" Pass pass.bpf.c

// Object is the compiled file, for loaders that read one.
func Object() []byte { return _PassBytes }
