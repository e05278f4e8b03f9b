// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// Holding returns the TCP sockets that occupy an address. They listen or are bound (listed since
// Linux 6.8) on its port, at the address or at all addresses.
func Holding(at netip.AddrPort) ([]Socket, error) {
	all, err := Dump(Query{Proto: unix.IPPROTO_TCP, States: 1<<Listen | 1<<BoundInactive, LocalPort: at.Port()})
	if err != nil {
		return nil, err
	}
	var out []Socket
	want := at.Addr().Unmap()
	for _, s := range all {
		a := s.Local.Addr().Unmap()
		same := a == want || a.IsUnspecified() && (a.Is4() == want.Is4() || !s.V6Only)
		if same || want.IsUnspecified() && (a.Is4() == want.Is4() || want.Is6()) {
			out = append(out, s)
		}
	}
	return out, nil
}
