// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// checkCopy returns the problem of the copy option of s, or "".
func checkCopy(s Service, all []Service) string {
	if s.Copy == "" {
		return ""
	}
	seen := map[string]bool{s.Name: true}
	for at := s; at.Copy != ""; {
		if seen[at.Copy] {
			return fmt.Sprintf("copy: %s leads back to %s: copies must not form a loop", s.Copy, s.Name)
		}
		seen[at.Copy] = true
		i := slices.IndexFunc(all, func(o Service) bool { return o.Name == at.Copy })
		if i < 0 && at.Name == s.Name {
			return fmt.Sprintf("copy: service %q does not exist in this file: name an existing service", s.Copy)
		} else if i < 0 {
			break
		}
		at = all[i]
	}
	to := all[slices.IndexFunc(all, func(o Service) bool { return o.Name == s.Copy })]
	if to.Netns != s.Netns {
		return fmt.Sprintf("copy: %s is in another network namespace: copies stay in their namespace", s.Copy)
	}
	if _, err := CopyTargets(s.Endpoints(), to.Endpoints()); err != nil {
		return fmt.Sprintf("copy: %s: %v", s.Copy, err)
	}
	return ""
}

// CopyTargets returns the copy target of each endpoint. The nth UDP listen of a family goes to the other service's nth
// UDP listen of the family, or to its only one.
func CopyTargets(from, to []service.Endpoint) (map[bpf.CopyCopyKey]bpf.CopyCopyTo, error) {
	out := map[bpf.CopyCopyKey]bpf.CopyCopyTo{}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		other := func(e service.Endpoint) bool { return e.Proto != unix.IPPROTO_UDP || e.Family != family }
		sources, targets := slices.DeleteFunc(slices.Clone(from), other), slices.DeleteFunc(slices.Clone(to), other)
		for i, e := range sources {
			n := min(i, len(targets)-1)
			switch {
			case n < 0:
				return nil, fmt.Errorf("it has no listen for datagrams to %s: add a udp listen of this family", e)
			case n < i && len(targets) > 1:
				return nil, fmt.Errorf("it has %d udp listens of a family for %d copied ones: use the same number, or one", len(targets), len(sources))
			}
			t := targets[n]
			key, value := CopyKey(e), bpf.CopyCopyTo{Port: NetworkOrder(t.Port)}
			switch t.Prefix.Bits() {
			case 0:
			case t.Prefix.Addr().BitLen():
				value.Readdressed = 1
				copy(value.Addr[:], t.Prefix.Addr().AsSlice())
			default:
				return nil, fmt.Errorf("its listen %s is a prefix, so a copy has no address: use a wildcard or one address", t.Prefix)
			}
			out[key] = value
		}
	}
	if len(out) == 0 {
		return nil, errors.New("only datagrams are copied, but the service has no UDP listen")
	}
	return out, nil
}

// CopyKey returns an endpoint's key in the maps of the copy filter.
func CopyKey(e service.Endpoint) bpf.CopyCopyKey {
	k := bpf.CopyCopyKey{Prefixlen: 32 + uint32(e.Prefix.Bits()), Family: e.Family, Port: e.Port}
	copy(k.Addr[:], e.Prefix.Masked().Addr().AsSlice())
	return k
}

// NetworkOrder converts a number from host to network byte order.
func NetworkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// linkHeaders are the link header lengths in bytes, by link type. The kernel's dev_is_mac_header_xmit makes the same
// distinction (include/linux/if_arp.h).
var linkHeaders = map[string]uint32{"ether": 14, "loopback": 14, "none": 0, "void": 0, "ipip": 0, "tunnel6": 0, "sit": 0,
	"gre": 0, "ipgre": 0, "ip6gre": 0, "ppp": 0, "rawip": 0}

// CopyDevices returns the devices of this namespace that receive packets for the host, with their link header lengths.
// Packets of a bridge or bond port arrive again at the master device, so ports are left out.
func CopyDevices() (map[uint32]uint32, error) {
	links, err := dump.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	types := map[int]string{}
	for _, l := range links {
		types[l.Attrs().Index] = l.Type()
	}
	out := map[uint32]uint32{}
	for _, l := range links {
		a := l.Attrs()
		header, known := linkHeaders[a.EncapType]
		if known && (a.MasterIndex == 0 || types[a.MasterIndex] == "vrf") {
			out[uint32(a.Index)] = header
		}
	}
	return out, nil
}
