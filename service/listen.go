// SPDX-License-Identifier: Apache-2.0

// Package service describes weir's services: their traffic, their slots, and the sockets of the processes that serve
// them.
package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Listen names traffic by protocol, destination and port:
//
//	udp 0.0.0.0:4739        every IPv4 address of the host
//	tcp [::]:1790           every IPv6 and IPv4 address, like a dual-stack socket
//	tcp6 [::]:1790          every IPv6 address only
//	udp :4739               every address
//	udp 192.0.2.0/28:4739   a prefix
//	udp [2001:db8::]/64:4739
type Listen struct {
	Proto  uint8        // unix.IPPROTO_TCP or unix.IPPROTO_UDP
	V4, V6 bool         // covered families
	Prefix netip.Prefix // prefix of a single family; invalid for every address of both families
	Port   uint16       // host byte order
	text   string
}

// ErrListen is wrapped by every error about the text of a Listen.
var ErrListen = errors.New("invalid listen")

// ParseListen parses the form described at Listen.
func ParseListen(s string) (Listen, error) {
	bad := func(format string, a ...any) (Listen, error) {
		return Listen{}, fmt.Errorf("%w: %q: %s", ErrListen, s, fmt.Sprintf(format, a...))
	}
	proto, rest, ok := strings.Cut(strings.TrimSpace(s), " ")
	rest = strings.TrimSpace(rest)
	if !ok || rest == "" {
		return bad(`want a protocol and an address, like "udp 0.0.0.0:4739"`)
	}
	l := Listen{V4: true, V6: true, text: proto + " " + rest}
	switch strings.TrimRight(proto, "46") {
	case "udp":
		l.Proto = unix.IPPROTO_UDP
	case "tcp":
		l.Proto = unix.IPPROTO_TCP
	default:
		return bad("protocol %q: want udp or tcp (or udp4, udp6, tcp4, tcp6 for one family)", proto)
	}
	switch proto[3:] {
	case "":
	case "4":
		l.V6 = false
	case "6":
		l.V4 = false
	default:
		return bad("protocol %q: want udp, udp4, udp6, tcp, tcp4 or tcp6", proto)
	}
	colon := strings.LastIndexByte(rest, ':')
	if colon < 0 {
		return bad("no port: add one, like %s:4739", rest)
	}
	port, err := strconv.ParseUint(rest[colon+1:], 10, 16)
	if err != nil || port == 0 {
		return bad("port %q: want a number from 1 to 65535", rest[colon+1:])
	}
	l.Port = uint16(port)
	if host := rest[:colon]; host != "" && host != "*" {
		if err := l.setHost(host); err != nil {
			return bad("%v", err)
		}
	} else if l.V4 != l.V6 {
		l.Prefix = netip.PrefixFrom(anyAddr(l.V4), 0)
	}
	return l, nil
}

func anyAddr(v4 bool) netip.Addr {
	if v4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// setHost parses an address or a prefix and sets the families.
func (l *Listen) setHost(host string) error {
	addr, bits, isPrefix := strings.Cut(host, "/")
	if bracketed, ok := strings.CutPrefix(addr, "["); ok {
		addr, ok = strings.CutSuffix(bracketed, "]")
		if !ok { // [2001:db8::/64]
			bits, ok = strings.CutSuffix(bits, "]")
			if !ok {
				return fmt.Errorf("%q: a [ without its ]", host)
			}
		}
	} else if strings.Contains(addr, ":") {
		return fmt.Errorf("%q: put an IPv6 address in brackets, like [%s]:%d", host, addr, l.Port)
	}
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return fmt.Errorf("%q is not an IP address or prefix; want one like 192.0.2.7, 192.0.2.0/24 or [2001:db8::]/64", host)
	}
	if a.Zone() != "" {
		return fmt.Errorf("%q: zones are not supported: leave out %%%s", host, a.Zone())
	}
	a = a.Unmap()
	n := a.BitLen()
	if isPrefix {
		if n, err = strconv.Atoi(bits); err != nil || n < 0 || n > a.BitLen() {
			return fmt.Errorf("prefix length %q: want a number from 0 to %d", bits, a.BitLen())
		}
	} else if a.IsUnspecified() {
		n = 0
		if a.Is6() && l.V4 && l.V6 {
			return nil // [::] without a family means every address of both, as in the kernel
		}
	}
	p := netip.PrefixFrom(a, n)
	if p.Masked() != p {
		return fmt.Errorf("prefix %s has bits set beyond its length; did you mean %s?", p, p.Masked())
	}
	if a.Is4() && !l.V4 || a.Is6() && !l.V6 {
		return fmt.Errorf("%q is not of the family of %q", host, l.text[:4])
	}
	l.Prefix, l.V4, l.V6 = p, a.Is4(), a.Is6()
	return nil
}

// String returns the original text.
func (l Listen) String() string { return l.text }

// MarshalText implements encoding.TextMarshaler.
func (l Listen) MarshalText() ([]byte, error) { return []byte(l.text), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Listen) UnmarshalText(b []byte) (err error) {
	*l, err = ParseListen(string(b))
	return err
}

// Endpoint is the traffic of one socket: one protocol, family, prefix and port.
type Endpoint struct {
	Proto  uint8
	Family uint8        // unix.AF_INET or unix.AF_INET6
	Prefix netip.Prefix // of this family
	Port   uint16       // host byte order
	Listen int          // index of its Listen
}

func (e Endpoint) String() string {
	proto, family := "tcp", "4"
	if e.Proto == unix.IPPROTO_UDP {
		proto = "udp"
	}
	if e.Family == unix.AF_INET6 {
		family = "6"
	}
	switch {
	case e.Prefix.Bits() == 0:
		return fmt.Sprintf("%s%s :%d", proto, family, e.Port)
	case e.Prefix.IsSingleIP():
		return fmt.Sprintf("%s %s", proto, netip.AddrPortFrom(e.Prefix.Addr(), e.Port))
	case e.Prefix.Addr().Is4():
		return fmt.Sprintf("%s %s:%d", proto, e.Prefix, e.Port)
	}
	return fmt.Sprintf("%s [%s]/%d:%d", proto, e.Prefix.Addr(), e.Prefix.Bits(), e.Port)
}

// Endpoints returns the listen's endpoints, one for each family.
func (l Listen) Endpoints(index int) []Endpoint {
	var out []Endpoint
	if l.V4 {
		out = append(out, l.endpoint(index, unix.AF_INET))
	}
	if l.V6 {
		out = append(out, l.endpoint(index, unix.AF_INET6))
	}
	return out
}

// covers reports whether a socket bound to l gets every packet of o.
func (l Listen) covers(o Listen) bool {
	for _, want := range o.Endpoints(0) {
		if !slices.ContainsFunc(l.Endpoints(0), func(e Endpoint) bool {
			return e.Proto == want.Proto && e.Family == want.Family && e.Port == want.Port && e.Prefix.Bits() <= want.Prefix.Bits() && e.Prefix.Contains(want.Prefix.Addr())
		}) {
			return false
		}
	}
	return true
}

func (l Listen) endpoint(index int, family uint8) Endpoint {
	e := Endpoint{Proto: l.Proto, Family: family, Prefix: l.Prefix, Port: l.Port, Listen: index}
	if !e.Prefix.IsValid() {
		e.Prefix = netip.PrefixFrom(anyAddr(family == unix.AF_INET), 0)
	}
	return e
}

// Overlaps reports whether a packet could belong to both: they have the same protocol, family, port and prefix.
// Different prefixes do not overlap, because the longer one wins.
func (e Endpoint) Overlaps(o Endpoint) bool {
	return e.Proto == o.Proto && e.Family == o.Family && e.Port == o.Port && e.Prefix == o.Prefix
}
