// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/repair"
)

// Connection tracking remembers the windows of a connection. A session that leaves and comes back is elsewhere in its streams by then:
// its packets are outside of the windows, thus invalid, and firewalls drop them. So the entry of a session goes when the session has
// left, and before it is restored: conntrack then picks the connection up anew.

// untrack deletes the entries of a session, in every zone that is in use. It finds an entry by either direction: one end of it may be
// translated (NAT).
func (a *Agent) untrack(f repair.Flow) {
	err := a.inside(func() error {
		var errs []error
		for _, zone := range a.zones.get() {
			for _, t := range []struct{ from, to netip.AddrPort }{{f.Remote, f.Local}, {f.Local, f.Remote}} {
				if err := deleteTracked(t.from, t.to, zone); !errors.Is(err, errNoCtnetlink) {
					errs = append(errs, err)
				}
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		a.o.Log.Warn("conntrack keeps a session's entry, and may take its packets for invalid", "flow", f, "err", err)
	}
}

// Attributes of ctnetlink (linux/netfilter/nfnetlink_conntrack.h).
const (
	subsystem      = 1 // NFNL_SUBSYS_CTNETLINK
	tupleIP        = 1
	tupleProto     = 2
	tupleZone      = 3
	protoNum       = 1
	protoFromPort  = 2
	protoToPort    = 3
	fromV4, toV4   = 1, 2
	fromV6, toV6   = 3, 4
	nestedAttr     = unix.NLA_F_NESTED
	lookForZones   = 30 * time.Second
	mostTrackZones = 64
)

// trackRequest begins a message about the entries of a family.
func trackRequest(operation, flags int, v4 bool) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(subsystem<<8|operation, flags)
	family := uint8(unix.AF_INET6)
	if v4 {
		family = unix.AF_INET
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return r
}

// deleteTracked deletes the entry one of whose directions is that of TCP packets between two ends.
func deleteTracked(from, to netip.AddrPort, zone uint16) error {
	src, dst := from.Addr().Unmap(), to.Addr().Unmap()
	fromAttr, toAttr := fromV6, toV6
	if src.Is4() {
		fromAttr, toAttr = fromV4, toV4
	}
	r := trackRequest(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, src.Is4())
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
	case errors.Is(err, unix.ENOENT): // there is none
		return nil
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL): // no nfnetlink, no ctnetlink
		return errNoCtnetlink
	}
	return err
}

// errNoCtnetlink says that entries of conntrack cannot be deleted, if there is a conntrack: doctor tells.
var errNoCtnetlink = errors.New("no ctnetlink in this kernel")

// zones are those in which conntrack has entries; the one by default is always there.
type zones struct{ known atomic.Pointer[[]uint16] }

func (z *zones) get() []uint16 {
	if k := z.known.Load(); k != nil {
		return *k
	}
	return []uint16{0}
}

// watchZones looks which zones of conntrack are in use at the services' addresses. Rules set them, and may change.
func (a *Agent) watchZones(ctx context.Context) {
	t := time.NewTicker(lookForZones)
	defer t.Stop()
	for {
		var now []uint16
		if err := a.inside(func() (err error) { now, err = a.zonesInUse(); return err }); err == nil {
			a.zones.known.Store(&now)
		} // else what was known stays: this kernel may have no ctnetlink
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (a *Agent) zonesInUse() ([]uint16, error) {
	out := []uint16{0}
	for _, v4 := range []bool{true, false} {
		r := trackRequest(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, v4)
		err := r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(b []byte) bool {
			for _, zone := range zonesOf(b[min(len(b), nl.SizeofNfgenmsg):]) {
				if !slices.Contains(out, zone) {
					out = append(out, zone)
				}
			}
			return len(out) < mostTrackZones
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// zonesOf are the zones of an entry: its own, or one of a direction.
func zonesOf(b []byte) (out []uint16) {
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
