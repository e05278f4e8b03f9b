// SPDX-License-Identifier: Apache-2.0

package protect

//go:generate go tool bpf2go -tags linux -no-global-types -cflags "-mcpu=v3 -O2 -g -Wall -Werror -Wno-unused-function -I.. -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type reroute_repair -type reroute_path -type reroute_prefix -type reroute_tally protect protect.bpf.c
