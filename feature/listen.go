// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Listen is a TCP listen address in the file for a feature's process, in the network namespace of weir serve.
type Listen struct {
	strictyaml.Pos        // of the section
	Section        string // "lb", "handoff.backend"
	Address        string // host:port, the value of the section's key listen
}

// Listener is implemented by features with such addresses. Reading a file fails if two of them exclude each other.
type Listener[C any] interface {
	Listens(spec C) []Listen
}

// Excludes reports whether the kernel rejects the second of two listeners: they have the same port and address, or one
// has the unspecified address of the other's family. Different host names count as different addresses.
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
	both := func(a netip.Addr) bool { return a == netip.IPv6Unspecified() } // it accepts IPv4 too
	return a == b || both(a) || both(b) || a.Is4() == b.Is4() && (a.IsUnspecified() || b.IsUnspecified())
}

// Await reports an address that no interface has. Normally this is a warning, because the address may appear later. It
// is an outage if the listener works at another address, was: a misspelt address would end it. An empty was means none.
func (l Listen) Await(p *Plan, was string) {
	lacks := l.Lacks()
	switch {
	case lacks == "":
	case was == "" || was == l.Address || (Listen{Address: was}).Lacks() != "":
		p.Warn("%s: listen %q: %s: agents connect once one has it", l.Section, l.Address, lacks)
	default:
		p.Outage("%v", l.Errorf("%s: listen %q: %s, and agents connect to %s now: correct the address, or make this change once an interface has it",
			l.Section, l.Address, lacks, was))
	}
}

// Failures returns a failure of object if no interface has the address.
func (l Listen) Failures(object string) []Finding {
	lacks := l.Lacks()
	if lacks == "" {
		return nil
	}
	return []Finding{Failure(object, fmt.Sprintf("%s.listen is %s, and %s: no agent connects", l.Section, l.Address, lacks), "give the address to an interface, or correct "+l.Section+".listen")}
}

// Lacks returns a text if no interface of the calling thread's network namespace has the address, else "". It returns ""
// for host names.
func (l Listen) Lacks() string {
	host, _, err := net.SplitHostPort(l.Address)
	if err != nil || host == "" {
		return ""
	}
	a, err := netip.ParseAddr(host)
	if err != nil || a.IsUnspecified() {
		return ""
	}
	a = a.Unmap().WithZone("")
	e := service.Endpoint{Family: unix.AF_INET, Prefix: netip.PrefixFrom(a, a.BitLen())}
	if a.Is6() {
		e.Family = unix.AF_INET6
	}
	if absent, err := service.NotLocal([]service.Endpoint{e}); err != nil || len(absent) == 0 {
		return ""
	}
	return "no interface has " + a.String()
}

// split is net.SplitHostPort with a numeric port.
func split(address string) (host string, port int, err error) {
	host, name, err := net.SplitHostPort(address)
	if err == nil {
		port, err = net.LookupPort("tcp", name)
	}
	return host, port, err
}

// every returns the address of a host. "" means the unspecified address.
func every(host string) (netip.Addr, error) {
	if host == "" {
		return netip.IPv6Unspecified(), nil
	}
	a, err := netip.ParseAddr(host)
	return a.Unmap(), err
}
