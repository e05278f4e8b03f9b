// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

var be = binary.BigEndian

// Common numbers of all simulated routers. The AS numbers are from the private range (RFC 6996), the
// addresses inside the telemetry from the documentation and benchmark ranges (RFC 5737, 2544, 3849).
const (
	routerAS = 64600
	peerAS   = 64601
)

// Device is one simulated router.
type Device struct {
	Index int
	Addr  netip.Addr // source address of all its packets

	peer netip.Addr // the BGP neighbour of its reported routes, of Addr's family
	self netip.Addr // its own end of this BGP session
	id   [4]byte    // BGP identifier
}

// NewDevice returns router number index (0 to 65535) with the source address addr.
func NewDevice(index int, addr netip.Addr) *Device {
	hi, lo := byte(index>>8), byte(index)
	d := &Device{Index: index, Addr: addr, id: [4]byte{198, 18, hi, lo}}
	if addr.Is4() {
		d.peer = netip.AddrFrom4([4]byte{198, 19, hi, lo})
		d.self = netip.AddrFrom4(d.id)
		return d
	}
	d.peer = netip.MustParseAddr(fmt.Sprintf("2001:db8:19::%x", index+1))
	d.self = netip.MustParseAddr(fmt.Sprintf("2001:db8:18::%x", index+1))
	return d
}

// Name returns the router's name in its BMP Initiation message.
func (d *Device) Name() string { return fmt.Sprintf("router-%d", d.Index) }
