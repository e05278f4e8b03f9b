// SPDX-License-Identifier: Apache-2.0

package server

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type gate_key -type gate_pair -type gate_entry gate gate.bpf.c
