// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// A UDP socket answers from what it is bound to, unless told otherwise, and a client
// drops an answer that comes from elsewhere than it sent to. So serveUDP asks for the
// destination of every datagram, and reply answers from there.
func serveUDP(c *net.UDPConn) error {
	own := c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	raw, err := c.SyscallConn()
	if err == nil {
		err = control(raw, askDestination)
	}
	if err != nil {
		return err
	}
	data, oob := make([]byte, 65535), make([]byte, 256)
	for {
		n, m, _, from, err := c.ReadMsgUDPAddrPort(data, oob)
		if err != nil {
			return err
		}
		to, err := destination(oob[:m])
		if err == nil && to.Port() == own {
			err = reply(c, data[:n], to.Addr(), from)
		} else if err == nil {
			err = replyFromPort(data[:n], to, from)
		}
		if err != nil {
			log.Printf("to %s: %v", from, err) // its client may be gone; the others are not
		}
	}
}

// askDestination has datagrams come with the address and port that they were sent to.
func askDestination(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return err
	}
	if domain == unix.AF_INET6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR, 1); err != nil {
			return fmt.Errorf("IPV6_RECVORIGDSTADDR: %w", err)
		}
		// A route of type local suffices for IPv4 to take an address for the host's
		// own. IPv6 asks the interfaces, unless the socket says that it does not mind.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
			return fmt.Errorf("IPV6_FREEBIND: %w", err)
		}
	}
	// Also for IPv6: a dual-stack socket gets datagrams of IPv4.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR, 1); err != nil {
		return fmt.Errorf("IP_RECVORIGDSTADDR: %w", err)
	}
	return nil
}

// destination finds in control messages where a datagram was sent to.
func destination(oob []byte) (netip.AddrPort, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for _, m := range messages {
		switch a, _ := unix.ParseOrigDstAddr(&m); a := a.(type) {
		case *unix.SockaddrInet4:
			return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), nil
		case *unix.SockaddrInet6:
			return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("the kernel did not say where a datagram was sent to")
}

// reply sends from an address, and from the port that the socket is bound to.
func reply(c *net.UDPConn, data []byte, from netip.Addr, to netip.AddrPort) error {
	var oob []byte
	if from.Is4() {
		oob = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: from.As4()})
	} else {
		oob = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: from.As16()})
	}
	_, _, err := c.WriteMsgUDPAddrPort(data, oob, to)
	return err
}

// replyFromPort sends from an address and port, which takes a socket that is bound to
// them: a control message can say the address only. It is for bindings of another port
// than the socket's own, or of every port.
//
// Nothing arrives at this socket that was meant for the service, since the kernel asks
// weir's program first. It is not to be connected: connected sockets come before the
// program, and it would take the client's next datagram.
func replyFromPort(data []byte, from, to netip.AddrPort) error {
	config := net.ListenConfig{Control: answerFrom}
	c, err := config.ListenPacket(context.Background(), "udp", from.String())
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.(*net.UDPConn).WriteToUDPAddrPort(data, netip.AddrPortFrom(to.Addr().Unmap(), to.Port()))
	return err
}

// answerFrom prepares a socket to be bound to an address that no interface has.
func answerFrom(network, _ string, c syscall.RawConn) error {
	return control(c, func(fd int) error {
		if network == "udp6" {
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
				return err
			}
		}
		// Others may be answering from the same port.
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
}
