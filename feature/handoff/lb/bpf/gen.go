// SPDX-License-Identifier: Apache-2.0

// Package bpf has the BPF programs of the load balancer, their header and the generated Go code.
package bpf

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type lb_service_key -type lb_service -type lb_backend -type lb_mac_key -type lb_tunnel_key -type lb_config -type lb_flow_key -type lb_flow -type lb_change_args -type lb_unasked LB lb.bpf.c

// Removed is LB_REMOVED of lb.h: the value of Unwell of a removed backend.
const Removed = 2

// Object is the compiled object.
func Object() []byte { return _LBBytes }
