// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Attributes of requests and answers, from linux/inet_diag.h.
const (
	reqBytecode = 1 // INET_DIAG_REQ_BYTECODE
	reqProtocol = 3 // INET_DIAG_REQ_PROTOCOL

	attrInfo      = 2  // INET_DIAG_INFO
	attrSKMemInfo = 7  // INET_DIAG_SKMEMINFO
	attrSKV6Only  = 11 // INET_DIAG_SKV6ONLY
)

// Indexes into INET_DIAG_SKMEMINFO (SK_MEMINFO_*), an array of uint32.
const (
	memRmemAlloc = 0
	memRcvbuf    = 1
	memDrops     = 8
)

// Filter operation INET_DIAG_BC_S_EQ: local port equals.
const bcSourceEqual = 11

// sockID is struct inet_diag_sockid: ports and addresses in network byte order, other fields in
// native order.
type sockID struct {
	SrcPort, DstPort [2]byte
	Src, Dst         [16]byte
	Interface        uint32
	Cookie           [2]uint32 // low half first
}

// diagRequest is struct inet_diag_req_v2.
type diagRequest struct {
	Family, Protocol, Ext, _ uint8
	States                   uint32
	ID                       sockID
}

// diagMessage is struct inet_diag_msg.
type diagMessage struct {
	Family, State, Timer, Retrans               uint8
	ID                                          sockID
	Expires, RecvQueue, SendQueue, UID, InodeNr uint32
}

var diagMessageLen = binary.Size(diagMessage{})

func dumpRequest(q Query, proto uint32, family uint8) (netlink.Message, error) {
	r := diagRequest{Family: family, Ext: 1 << (attrSKMemInfo - 1), States: q.States}
	if q.States == 0 {
		r.States = ^uint32(0)
	}
	if q.Info {
		r.Ext |= 1 << (attrInfo - 1)
	}
	attrs := netlink.NewAttributeEncoder()
	if proto <= 0xff {
		r.Protocol = uint8(proto)
	} else {
		attrs.Uint32(reqProtocol, proto)
	}
	if q.LocalPort != 0 {
		attrs.Bytes(reqBytecode, portFilter(q.LocalPort))
	}
	return message(unix.SOCK_DIAG_BY_FAMILY, netlink.Request|netlink.Dump, r, attrs)
}

// portFilter returns a program of two struct inet_diag_bc_op to accept one local port. "yes" jumps
// to the end (8 bytes), which accepts. "no" jumps 4 bytes past it, which rejects. The second
// operation only holds the port, in native byte order.
func portFilter(port uint16) []byte {
	b := []byte{bcSourceEqual, 8}
	b = binary.NativeEndian.AppendUint16(b, 12)
	b = append(b, 0, 0)
	return binary.NativeEndian.AppendUint16(b, port)
}

func destroyRequest(s Socket) (netlink.Message, error) {
	if !s.Local.IsValid() || s.Cookie == 0 {
		return netlink.Message{}, errors.New("no addresses or no cookie; pass a socket from Dump")
	}
	r := diagRequest{Family: s.Family, Protocol: s.Proto, States: 1 << s.State, ID: sockID{
		Src:       encodeAddr(s.Family, s.Local.Addr()),
		Dst:       encodeAddr(s.Family, s.Remote.Addr()),
		Interface: s.Interface,
		Cookie:    [2]uint32{uint32(s.Cookie), uint32(s.Cookie >> 32)},
	}}
	binary.BigEndian.PutUint16(r.ID.SrcPort[:], s.Local.Port())
	binary.BigEndian.PutUint16(r.ID.DstPort[:], s.Remote.Port())
	return message(unix.SOCK_DESTROY, netlink.Request|netlink.Acknowledge, r, netlink.NewAttributeEncoder())
}

func message(kind netlink.HeaderType, flags netlink.HeaderFlags, r diagRequest, attrs *netlink.AttributeEncoder) (netlink.Message, error) {
	tail, err := attrs.Encode()
	if err != nil {
		return netlink.Message{}, err
	}
	data, err := binary.Append(nil, binary.NativeEndian, r)
	if err != nil {
		return netlink.Message{}, err
	}
	return netlink.Message{
		Header: netlink.Header{Type: kind, Flags: flags},
		Data:   append(data, tail...),
	}, nil
}

func encodeAddr(family uint8, a netip.Addr) (b [16]byte) {
	if !a.IsValid() {
		return b
	}
	if family == unix.AF_INET {
		v4 := a.Unmap().As4()
		copy(b[:], v4[:])
		return b
	}
	return a.As16()
}

func decodeAddr(family uint8, addr [16]byte, port [2]byte) netip.AddrPort {
	a := netip.AddrFrom16(addr)
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(addr[:4]))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port[:]))
}

func parse(data []byte, q Query) (Socket, error) {
	var m diagMessage
	if _, err := binary.Decode(data, binary.NativeEndian, &m); err != nil {
		return Socket{}, fmt.Errorf("answer of %d bytes, want at least %d", len(data), diagMessageLen)
	}
	if m.Family != unix.AF_INET && m.Family != unix.AF_INET6 {
		return Socket{}, fmt.Errorf("answer with address family %d", m.Family)
	}
	s := Socket{
		Proto:     q.Proto,
		Family:    m.Family,
		State:     m.State,
		Local:     decodeAddr(m.Family, m.ID.Src, m.ID.SrcPort),
		Remote:    decodeAddr(m.Family, m.ID.Dst, m.ID.DstPort),
		Inode:     m.InodeNr,
		Cookie:    uint64(m.ID.Cookie[0]) | uint64(m.ID.Cookie[1])<<32,
		UID:       m.UID,
		Interface: m.ID.Interface,
		RecvQueue: m.RecvQueue,
		SendQueue: m.SendQueue,
	}
	attrs, err := netlink.NewAttributeDecoder(data[diagMessageLen:])
	if err != nil {
		return Socket{}, fmt.Errorf("attributes of an answer: %w", err)
	}
	for attrs.Next() {
		switch attrs.Type() {
		case attrSKMemInfo:
			s.Mem = parseMemory(attrs.Bytes())
		case attrSKV6Only:
			s.V6Only = attrs.Uint8() != 0
		case attrInfo:
			// UDP sockets and listeners also have the attribute, empty or without meaning.
			if q.Info && q.Proto == unix.IPPROTO_TCP && len(attrs.Bytes()) > 0 {
				s.Info = parseTCPInfo(attrs.Bytes())
			}
		}
	}
	if err := attrs.Err(); err != nil {
		return Socket{}, fmt.Errorf("attributes of an answer: %w", err)
	}
	return s, nil
}

func parseMemory(b []byte) Memory {
	return Memory{
		RcvAlloc: u32(b, 4*memRmemAlloc),
		RcvBuf:   u32(b, 4*memRcvbuf),
		Drops:    u32(b, 4*memDrops),
	}
}

func parseTCPInfo(b []byte) *TCPInfo {
	var k unix.TCPInfo // for its offsets, equal to the kernel's
	const ms, us = time.Millisecond, time.Microsecond
	return &TCPInfo{
		BytesReceived: u64(b, unsafe.Offsetof(k.Bytes_received)),
		BytesAcked:    u64(b, unsafe.Offsetof(k.Bytes_acked)),
		SegsIn:        u32(b, unsafe.Offsetof(k.Segs_in)),
		SegsOut:       u32(b, unsafe.Offsetof(k.Segs_out)),
		DataSegsIn:    u32(b, unsafe.Offsetof(k.Data_segs_in)),
		DataSegsOut:   u32(b, unsafe.Offsetof(k.Data_segs_out)),
		LastDataRecv:  time.Duration(u32(b, unsafe.Offsetof(k.Last_data_recv))) * ms,
		LastDataSent:  time.Duration(u32(b, unsafe.Offsetof(k.Last_data_sent))) * ms,
		RTT:           time.Duration(u32(b, unsafe.Offsetof(k.Rtt))) * us,
		RTTVar:        time.Duration(u32(b, unsafe.Offsetof(k.Rttvar))) * us,
		TotalRetrans:  u32(b, unsafe.Offsetof(k.Total_retrans)),
	}
}

// u32 and u64 read a field in native byte order. They return 0 if an older kernel's answer is too
// short.
func u32(b []byte, at uintptr) uint32 {
	if uintptr(len(b)) < at+4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b[at:])
}

func u64(b []byte, at uintptr) uint64 {
	if uintptr(len(b)) < at+8 {
		return 0
	}
	return binary.NativeEndian.Uint64(b[at:])
}
