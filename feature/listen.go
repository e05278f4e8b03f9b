// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"net"
	"net/netip"

	"github.com/weir-project/weir/internal/strictyaml"
)

// Listen is a TCP address of the file at which the process of a feature listens, in the network namespace of weir serve.
type Listen struct {
	strictyaml.Pos        // of the section
	Section        string // "lb", "handoff.backend"
	Address        string // host:port, the value of its key listen
}

// Listener is implemented by features with such addresses. Two that exclude each other are refused when the file is read.
type Listener[C any] interface {
	Listens(spec C) []Listen
}

// Excludes reports whether the kernel refuses one of two listeners: they have the same port and address, or an address of one is every
// address of the other's family. Host names that are not the same are taken for other addresses.
func (l Listen) Excludes(o Listen) bool {
	host, port, err := split(l.Address)
	oHost, oPort, oErr := split(o.Address)
	if err != nil || oErr != nil || port == 0 || port != oPort {
		return false
	}
	a, aErr := every(host)
	b, bErr := every(oHost)
	if aErr != nil || bErr != nil {
		return host == oHost || aErr == nil && a.IsUnspecified() || bErr == nil && b.IsUnspecified()
	}
	both := func(a netip.Addr) bool { return a == netip.IPv6Unspecified() } // as a listener of IPv4, too
	return a == b || both(a) || both(b) || a.Is4() == b.Is4() && (a.IsUnspecified() || b.IsUnspecified())
}

// split is net.SplitHostPort with the number of the port.
func split(address string) (host string, port int, err error) {
	host, name, err := net.SplitHostPort(address)
	if err == nil {
		port, err = net.LookupPort("tcp", name)
	}
	return host, port, err
}

// every is the address of a host; that of "" is every address.
func every(host string) (netip.Addr, error) {
	if host == "" {
		return netip.IPv6Unspecified(), nil
	}
	a, err := netip.ParseAddr(host)
	return a.Unmap(), err
}
