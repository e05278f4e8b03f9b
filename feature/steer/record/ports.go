// SPDX-License-Identifier: Apache-2.0

package record

import (
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Ports returns the contents of steer_ports and steer_prefixes. With compared, targets include their prefix length,
// because the dispatch program compares it with bindings.
func Ports(services map[string]*Service, compared bool) (map[bpf.SteerPortKey]bpf.SteerPortValue, map[bpf.SteerPrefixKey]bpf.SteerTarget) {
	ports, prefixes := map[bpf.SteerPortKey]bpf.SteerPortValue{}, map[bpf.SteerPrefixKey]bpf.SteerTarget{}
	for _, p := range services {
		if p.Bypassed {
			continue
		}
		for i, ep := range p.Service.Endpoints() {
			key := bpf.SteerPortKey{Port: ep.Port, Proto: ep.Proto}
			target := bpf.SteerTarget{Service: p.ID + 1, Endpoint: uint32(i)}
			if compared {
				target.Endpoint |= uint32(ep.Prefix.Bits()) << 8
			}
			v := ports[key]
			switch {
			case ep.Prefix.Bits() > 0:
				prefixes[prefixKey(ep)] = target
				v.Prefixes++
			case ep.Family == unix.AF_INET:
				v.Any4 = target
			default:
				v.Any6 = target
			}
			ports[key] = v
		}
	}
	return ports, prefixes
}

func prefixKey(ep service.Endpoint) bpf.SteerPrefixKey {
	k := bpf.SteerPrefixKey{Prefixlen: 32 + uint32(ep.Prefix.Bits()), Proto: ep.Proto, Family: ep.Family, Port: ep.Port}
	copy(k.Addr[:], ep.Prefix.Addr().AsSlice())
	return k
}
