// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of liveness, their headers and their generated Go.
package bpf

// -mcpu=v3: compare-and-swap on a word of a map (Linux 5.12).
//go:generate go tool bpf2go -tags linux -no-global-types -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type liveness_tick_source -type liveness_beat -type liveness_common -type liveness_setup -type liveness_judgement -type liveness_state -type liveness_frame -type liveness_move Liveness liveness.bpf.c

// Object is the compiled object.
func Object() []byte { return _LivenessBytes }
