// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of liveness, their headers and their generated Go.
package bpf

// -mcpu=v3: compare-and-swap on a word of a map (Linux 5.12).
//go:generate go tool bpf2go -tags linux -no-global-types -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type live_metronome -type live_beat -type live_common -type live_setup -type live_judgement -type live_state -type live_frame -type live_move Live live.bpf.c

// Object is the compiled object.
func Object() []byte { return _LiveBytes }
