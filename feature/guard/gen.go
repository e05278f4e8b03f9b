// SPDX-License-Identifier: Apache-2.0

package guard

// -mcpu=v3: compare-and-swap on a word of a map (Linux 5.12).
//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type guard_state -type guard_limits -type guard_target_key -type guard_target -type guard_listen_key -type guard_listen -type guard_top_entry guard guard.bpf.c
