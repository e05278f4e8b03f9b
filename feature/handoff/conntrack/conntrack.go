// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes entries of the kernel's connection tracking, in the network namespace of the calling thread.
package conntrack

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes of ctnetlink (linux/netfilter/nfnetlink_conntrack.h).
const (
	subsystem     = 1 // NFNL_SUBSYS_CTNETLINK
	tupleIP       = 1
	tupleProto    = 2
	tupleZone     = 3
	protoNum      = 1
	protoFromPort = 2
	protoToPort   = 3
	fromV4, toV4  = 1, 2
	fromV6, toV6  = 3, 4
	nestedAttr    = unix.NLA_F_NESTED
	maxZones      = 64
)

// request starts a message about the entries of a family.
func request(operation, flags int, v4 bool) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(subsystem<<8|operation, flags)
	family := uint8(unix.AF_INET6)
	if v4 {
		family = unix.AF_INET
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return r
}

// Delete deletes the entry with a direction of TCP packets from one address to another. A missing entry is not an
// error. The error is ErrNone if the kernel lacks ctnetlink.
func Delete(from, to netip.AddrPort, zone uint16) error {
	src, dst := from.Addr().Unmap(), to.Addr().Unmap()
	fromAttr, toAttr := fromV6, toV6
	if src.Is4() {
		fromAttr, toAttr = fromV4, toV4
	}
	r := request(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, src.Is4())
	tuple := nl.NewRtAttr(nl.CTA_TUPLE_ORIG|nestedAttr, nil)
	ip := tuple.AddRtAttr(tupleIP|nestedAttr, nil)
	ip.AddRtAttr(fromAttr, src.AsSlice())
	ip.AddRtAttr(toAttr, dst.AsSlice())
	proto := tuple.AddRtAttr(tupleProto|nestedAttr, nil)
	proto.AddRtAttr(protoNum, []byte{unix.IPPROTO_TCP})
	proto.AddRtAttr(protoFromPort, nl.BEUint16Attr(from.Port()))
	proto.AddRtAttr(protoToPort, nl.BEUint16Attr(to.Port()))
	r.AddData(tuple)
	if zone != 0 {
		r.AddData(nl.NewRtAttr(nl.CTA_ZONE, nl.BEUint16Attr(zone)))
	}
	_, err := r.Execute(unix.NETLINK_NETFILTER, 0)
	switch {
	case errors.Is(err, unix.ENOENT): // no entry
		return nil
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL): // no nfnetlink, or no ctnetlink
		return ErrNone
	}
	return err
}

// ErrNone means the kernel cannot delete conntrack entries, if it has conntrack.
var ErrNone = errors.New("no ctnetlink in this kernel")

// Zones returns the zones with entries, and zone 0.
func Zones() ([]uint16, error) {
	out := []uint16{0}
	for _, v4 := range []bool{true, false} {
		r := request(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, v4)
		err := r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(b []byte) bool {
			for _, zone := range readZones(b[min(len(b), nl.SizeofNfgenmsg):]) {
				if !slices.Contains(out, zone) {
					out = append(out, zone)
				}
			}
			return len(out) < maxZones
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readZones returns the zones of an entry: its own, or a direction's.
func readZones(b []byte) (out []uint16) {
	each(b, func(kind uint16, v []byte) {
		switch {
		case kind == nl.CTA_ZONE && len(v) >= 2:
			out = append(out, binary.BigEndian.Uint16(v))
		case kind == nl.CTA_TUPLE_ORIG || kind == nl.CTA_TUPLE_REPLY:
			each(v, func(kind uint16, v []byte) {
				if kind == tupleZone && len(v) >= 2 {
					out = append(out, binary.BigEndian.Uint16(v))
				}
			})
		}
	})
	return out
}

// each calls f with each attribute.
func each(b []byte, f func(kind uint16, value []byte)) {
	for len(b) >= unix.NLA_HDRLEN {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.NLA_HDRLEN || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.NLA_HDRLEN:n])
		b = b[min(len(b), (n+3)&^3):]
	}
}
