// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// family restricts an option to certain sockets.
type family uint8

const (
	anyFamily  family = iota
	socketIPv6        // AF_INET6, IPv4-mapped or not
	packetIPv4        // sockets with IPv4 packets
)

// option is a moved socket option.
type option struct {
	id         uint8 // on the wire: never reused
	name       string
	level, opt int
	of         family
	early      bool // required before bind or connect
}

// options are in setting order: IP_TOS changes the priority, and TCP_CORK must be set before TCP_NODELAY flushes.
// Options for connecting (TCP_SYNCNT, TCP_DEFER_ACCEPT) and momentary ones (TCP_QUICKACK) are not moved.
var options = []option{
	{1, "IPV6_V6ONLY", unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, socketIPv6, true},
	{2, "IP_TRANSPARENT", unix.IPPROTO_IP, unix.IP_TRANSPARENT, packetIPv4, true},
	{3, "IP_FREEBIND", unix.IPPROTO_IP, unix.IP_FREEBIND, packetIPv4, true},
	{4, "IPV6_TRANSPARENT", unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, socketIPv6, true},
	{5, "IPV6_FREEBIND", unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, socketIPv6, true},
	{6, "SO_MARK", unix.SOL_SOCKET, unix.SO_MARK, anyFamily, true},
	{7, "SO_DONTROUTE", unix.SOL_SOCKET, unix.SO_DONTROUTE, anyFamily, true},
	{8, "IP_TOS", unix.IPPROTO_IP, unix.IP_TOS, packetIPv4, true},
	{9, "IPV6_TCLASS", unix.IPPROTO_IPV6, unix.IPV6_TCLASS, socketIPv6, true},
	{10, "SO_PRIORITY", unix.SOL_SOCKET, unix.SO_PRIORITY, anyFamily, true},
	{11, "IP_TTL", unix.IPPROTO_IP, unix.IP_TTL, packetIPv4, true},
	{12, "IP_MINTTL", unix.IPPROTO_IP, unix.IP_MINTTL, packetIPv4, true},
	{13, "IP_MTU_DISCOVER", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, packetIPv4, true},
	{14, "IPV6_UNICAST_HOPS", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, socketIPv6, true},
	{15, "IPV6_MINHOPCOUNT", unix.IPPROTO_IPV6, unix.IPV6_MINHOPCOUNT, socketIPv6, true},
	{16, "IPV6_MTU_DISCOVER", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, socketIPv6, true},
	{17, "TCP_CORK", unix.IPPROTO_TCP, unix.TCP_CORK, anyFamily, false},
	{18, "TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, anyFamily, false},
	{19, "TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, anyFamily, false},
	{20, "TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, anyFamily, false},
	{21, "TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, anyFamily, false},
	{22, "SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, anyFamily, false},
	{23, "TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, anyFamily, false},
	{24, "TCP_LINGER2", unix.IPPROTO_TCP, unix.TCP_LINGER2, anyFamily, false},
	{25, "TCP_NOTSENT_LOWAT", unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, anyFamily, false},
	{26, "TCP_THIN_LINEAR_TIMEOUTS", unix.IPPROTO_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, anyFamily, false},
	{27, "TCP_INQ", unix.IPPROTO_TCP, unix.TCP_INQ, anyFamily, false},
	{28, "TCP_RTO_MAX_MS", unix.IPPROTO_TCP, 44, anyFamily, false}, // Linux 6.15
	{29, "SO_OOBINLINE", unix.SOL_SOCKET, unix.SO_OOBINLINE, anyFamily, false},
	{30, "SO_RCVLOWAT", unix.SOL_SOCKET, unix.SO_RCVLOWAT, anyFamily, false},
	{31, "SO_MAX_PACING_RATE", unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, anyFamily, false},
	{32, "SO_ZEROCOPY", unix.SOL_SOCKET, unix.SO_ZEROCOPY, anyFamily, false},
}

func findOption(id uint8) *option {
	if i := int(id) - 1; i >= 0 && i < len(options) {
		return &options[i]
	}
	return nil
}

func (o *option) applies(s *State) bool {
	switch ip := s.Local.Addr(); o.of {
	case socketIPv6:
		return !ip.Is4()
	case packetIPv4:
		return ip.Unmap().Is4()
	}
	return true
}

// absent reports whether err means an option unknown to the kernel.
func absent(err error) bool {
	return errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.EOPNOTSUPP)
}

// readOptions records every option known to this kernel.
func (s *State) readOptions(fd int) error {
	for i := range options {
		o := &options[i]
		if !o.applies(s) {
			continue
		}
		v, err := unix.GetsockoptInt(fd, o.level, o.opt)
		if absent(err) {
			continue
		} else if err != nil {
			return fmt.Errorf("read %s: %w", o.name, err)
		}
		s.Options = append(s.Options, Option{o.id, uint32(v)})
	}
	return nil
}

// setOptions sets the early options, or the others. It returns options unknown to this kernel without an error: a
// session without a refinement beats none.
func (s *State) setOptions(fd int, early bool) (lost []string, err error) {
	for _, have := range s.Options {
		o := findOption(have.ID)
		if o == nil || !o.applies(s) {
			if early {
				lost = append(lost, fmt.Sprintf("socket option number %d: unknown to this weir", have.ID))
			}
			continue
		}
		if o.early != early {
			continue
		}
		now, err := unix.GetsockoptInt(fd, o.level, o.opt)
		if err == nil && uint32(now) == have.Value {
			continue // keep defaults as defaults; some options reject even their default
		}
		if err == nil {
			err = setInt(fd, o.level, o.opt, int(int32(have.Value)))
		}
		if absent(err) {
			lost = append(lost, fmt.Sprintf("%s (%d): unknown to this kernel", o.name, have.Value))
		} else if err != nil {
			return lost, fmt.Errorf("set %s to %d: %w", o.name, int32(have.Value), err)
		}
	}
	return lost, nil
}

// deviceName returns the name of an interface index in the socket's namespace, which may differ from the calling
// thread's. deviceIndex is its inverse.
func deviceName(fd, index int) (string, error) {
	req, err := unix.NewIfreq("")
	if err != nil {
		return "", err
	}
	req.SetUint32(uint32(index))
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFNAME, req); err != nil {
		return "", fmt.Errorf("name of interface %d: %w", index, err)
	}
	return req.Name(), nil
}

func deviceIndex(fd int, name string) (int, error) {
	req, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req)
	}
	if err != nil {
		return 0, fmt.Errorf("find interface %q of the session's link-local address (set State.Zone to its name here): %w", name, err)
	}
	return int(req.Uint32()), nil
}
