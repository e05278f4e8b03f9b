// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the BPF programs of the load balancer, their header and their generated Go.
package bpf

//go:generate go tool bpf2go -tags linux -cflags "-mcpu=v3 -O2 -g -Wall -Werror -I../../../../bpf -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type front_service_key -type front_service -type front_host -type front_mac_key -type front_tunnel_key -type front_config -type front_flow_key -type front_flow -type front_change_args Front front.bpf.c

// Object is the compiled object.
func Object() []byte { return _FrontBytes }
