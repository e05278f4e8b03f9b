// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// headerLen is the length of struct virtio_net_hdr (linux/virtio_net.h) before every frame. It describes
// the cutting of a large frame and the pending checksum.
const headerLen = 10

// Its fields, in the machine's byte order; flags and kind are its first bytes.
const (
	atKind      = 1
	atSize      = 4 // of a segment's payload
	atSumStart  = 6 // first byte of TCP, from the frame's start
	etherIPv4   = 0x0800
	etherIPv6   = 0x86dd
	etherHeader = 14
	maskECN     = unix.VIRTIO_NET_HDR_GSO_ECN
)

// segments are the segments of a large TCP packet. The kernel passes up to 64 KiB as one frame, and cuts it
// where needed. A line decides for each segment, and forwards consecutive segments with one fate uncut.
type segments struct {
	frame   []byte // with the header
	headers int    // bytes of Ethernet, IP and TCP; 0 for an ordinary frame
	tcp     int    // first byte of TCP, from the frame's start
	size    int    // payload of each segment except the last
	n       int
}

func parseSegments(frame []byte) segments {
	one := segments{frame: frame, n: 1}
	kind := frame[atKind] &^ maskECN
	if kind != unix.VIRTIO_NET_HDR_GSO_TCPV4 && kind != unix.VIRTIO_NET_HDR_GSO_TCPV6 {
		return one
	}
	ne := binary.NativeEndian
	size, tcp := int(ne.Uint16(frame[atSize:])), int(ne.Uint16(frame[atSumStart:]))
	packet := frame[headerLen:]
	if size == 0 || tcp < etherHeader+20 || len(packet) < tcp+20 {
		return one
	}
	headers := tcp + int(packet[tcp+12]>>4)*4
	payload := len(packet) - headers
	if payload <= size {
		return one
	}
	return segments{frame: frame, headers: headers, tcp: tcp, size: size, n: (payload + size - 1) / size}
}

// wireLen returns their bytes on a wire, each segment with its own headers.
func (s *segments) wireLen() int { return len(s.frame) - headerLen + (s.n-1)*s.headers }

// cut writes the segments in [from, before) into a separate frame, in the given buffer, like
// tcp_gso_segment.
func (s *segments) cut(to []byte, from, before int) []byte {
	begin, end := headerLen+s.headers+from*s.size, min(headerLen+s.headers+before*s.size, len(s.frame))
	b := append(append(to[:0], s.frame[:headerLen+s.headers]...), s.frame[begin:end]...)
	if end-begin <= s.size { // one segment is no large packet
		b[atKind] = unix.VIRTIO_NET_HDR_GSO_NONE
		binary.NativeEndian.PutUint16(b[atSize:], 0)
	}
	p := b[headerLen:]
	be := binary.BigEndian
	tcp := p[s.tcp:]
	be.PutUint32(tcp[4:], be.Uint32(tcp[4:])+uint32(from*s.size))
	const fin, psh, cwr = 1, 8, 0x80
	if before < s.n {
		tcp[13] &^= fin | psh
	}
	if from > 0 {
		tcp[13] &^= cwr
	}
	var sum uint32
	switch be.Uint16(p[12:]) {
	case etherIPv4:
		ip := p[etherHeader:s.tcp]
		be.PutUint16(ip[2:], uint16(len(p)-etherHeader))
		be.PutUint16(ip[4:], be.Uint16(ip[4:])+uint16(from))
		be.PutUint16(ip[10:], 0)
		be.PutUint16(ip[10:], ^fold(add(0, ip)))
		sum = add(0, ip[12:20])
	case etherIPv6:
		ip := p[etherHeader:s.tcp]
		be.PutUint16(ip[4:], uint16(len(p)-etherHeader-40))
		sum = add(0, ip[8:40])
	}
	// With a pending checksum, the field holds the pseudo-header's.
	be.PutUint16(tcp[16:], fold(sum+unix.IPPROTO_TCP+uint32(len(tcp))))
	return b
}

// add and fold compute the Internet checksum (RFC 1071), over an even number of bytes.
func add(sum uint32, b []byte) uint32 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	return sum
}

func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
