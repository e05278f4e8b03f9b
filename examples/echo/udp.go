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

// By default a UDP socket answers from its own address, and a client drops an answer from another
// address or port than it sent to. So serveUDP requests the destination of every datagram, and
// reply answers from there.
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
			log.Printf("to %s: %v", from, err) // its client may be gone, but others may not
		}
	}
}

// askDestination makes recvmsg(2) return the destination address and port of each datagram.
func askDestination(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return err
	}
	if domain == unix.AF_INET6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR, 1); err != nil {
			return fmt.Errorf("IPV6_RECVORIGDSTADDR: %w", err)
		}
		// For IPv4 a route of type local is enough to accept an address as the host's own. IPv6
		// checks the interfaces, unless the socket has this option.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
			return fmt.Errorf("IPV6_FREEBIND: %w", err)
		}
	}
	// Also for IPv6: a dual-stack socket receives IPv4 datagrams.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR, 1); err != nil {
		return fmt.Errorf("IP_RECVORIGDSTADDR: %w", err)
	}
	return nil
}

// destination returns the destination of a datagram from its control messages.
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
	return netip.AddrPort{}, fmt.Errorf("no destination in the control messages")
}

// reply sends from an address, and from the port of the socket.
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

// replyFromPort sends from an address and port. This requires a socket bound to them, because a
// control message can only set the address. It is for bindings of another port than the socket's
// own, or of every port.
//
// This socket receives nothing meant for the service, because the kernel runs weir's program first.
// Do not connect it: connected sockets precede the program, and it would receive the client's next
// datagram.
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

// answerFrom prepares a socket to be bound to an address not on any interface.
func answerFrom(network, _ string, c syscall.RawConn) error {
	return control(c, func(fd int) error {
		if network == "udp6" {
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
				return err
			}
		}
		// Other sockets may be answering from the same port.
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
}
