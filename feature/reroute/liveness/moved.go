// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/dump"
)

// readMove returns the link address of a device's neighbour learnt from signed probes.
func readMove(m *ebpf.Map, device int) (v bpf.LivenessLivenessMove, err error) {
	if err := m.Lookup(links.Slot(device), &v); err != nil {
		return v, fmt.Errorf("reading the link address of the neighbour on interface %d: %w", device, err)
	}
	return v, nil
}

// followMoves updates the kernel's neighbours to changed link addresses. Meanwhile the programs send to the new
// address. They notice the kernel's update within 250 ms.
func (s *scopeInstance) followMoves() error {
	for i := range uint32(maxSessions) {
		var c bpf.LivenessLivenessSetup
		if err := s.pins.Maps[pinSetups].Lookup(i, &c); err != nil {
			return fmt.Errorf("reading session %d: %w", i, err)
		}
		if c.On == 0 {
			continue
		}
		v, err := readMove(s.pins.Maps[pinMoves], int(c.Ifindex))
		if err == nil && v.Moved != 0 {
			err = follow(int(c.Ifindex), v.Was[:], v.Now[:])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// follow gives all neighbours with the old link address the new one. Their states stay.
func follow(device int, was, now net.HardwareAddr) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := dump.NeighList(device, family)
		if err != nil {
			return fmt.Errorf("listing neighbours: %w", err)
		}
		for _, n := range all {
			if !bytes.Equal(n.HardwareAddr, was) || n.State&(netlink.NUD_NOARP|netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0 {
				continue
			}
			n.HardwareAddr = now
			err := netlink.NeighSet(&netlink.Neigh{LinkIndex: device, Family: family, State: n.State, IP: n.IP, HardwareAddr: now})
			if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENETDOWN) {
				return fmt.Errorf("neighbour %s: setting its link address %s: %w", n.IP, now, err)
			}
		}
	}
	return nil
}
