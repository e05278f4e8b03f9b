// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/kernel"
)

// LIVENESS_TLV and LIVENESS_VERSION of liveness.h, and fields of a probe's headers (RFC 8754).
const (
	tlvType     = 252
	tlvVersion  = 1
	hopsOfProbe = 255
	srhType     = 4
)

// location is the place of a session in its namespace.
type location struct {
	index  uint32 // in the maps
	device int
	master int // of the device, 0: none; segments see a VRF's packets with the VRF's index
	table  int // routing table of its VRF; 0: main
}

func network16(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
func network32(v uint32) uint32 {
	return binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, v))
}
func network64(v uint64) uint64 {
	return binary.NativeEndian.Uint64(binary.BigEndian.AppendUint64(nil, v))
}

// setup returns the programs' configuration of a session.
func (s Session) setup(p location, key [2]uint64, life uint64) bpf.LivenessLivenessSetup {
	c := bpf.LivenessLivenessSetup{Key: key, Life: life, Interval: uint64(s.Interval), Grace: uint64(s.Grace), Hold: uint64(s.StableFor),
		HoldMax: uint64(s.StableMax), Id: s.ID, Ifindex: uint32(p.device), Master: uint32(p.master), On: 1, Multiplier: uint8(s.Multiplier)}
	for _, b := range []struct {
		to *uint8
		is bool
	}{{&c.Sends, s.sends()}, {&c.Judges, s.judges()}, {&c.Echo, s.Mode == Echo}, {&c.Observe, s.Observe}} {
		if b.is {
			*b.to = 1
		}
	}
	if !s.sends() {
		return c
	}
	c.Via.Bytes = s.Via.As16()
	f := &c.Frame
	f.Proto = network16(unix.ETH_P_IPV6)
	f.Ip.Word = network32(0x60000000 | 48<<22) // class CS6, as for other routing protocols
	f.Ip.PayloadLen = network16(uint16(unsafe.Sizeof(*f) - unsafe.Offsetof(f.Srh)))
	f.Ip.Nexthdr, f.Ip.HopLimit = unix.IPPROTO_ROUTING, hopsOfProbe
	f.Ip.Saddr.Bytes, f.Ip.Daddr.Bytes = s.Source.As16(), s.Peer.As16()
	f.Srh.Nexthdr, f.Srh.Type, f.Srh.SegmentsLeft, f.Srh.FirstSegment = unix.IPPROTO_NONE, srhType, 1, 1
	f.Srh.Hdrlen = uint8((unsafe.Sizeof(f.Seg) + unsafe.Sizeof(f.Tlv)) / 8)
	f.Seg[0].Bytes, f.Seg[1].Bytes = s.Source.As16(), s.Peer.As16()
	f.Tlv.Type, f.Tlv.Len, f.Tlv.Version = tlvType, uint8(unsafe.Sizeof(f.Tlv)-2), tlvVersion
	f.Tlv.Session, f.Tlv.Multiplier = network32(s.ID), uint8(s.Multiplier)
	f.Tlv.Interval, f.Tlv.Life = network32(uint32(s.Interval/time.Microsecond)), network64(life)
	return c
}

// identity returns the fields that must be equal for a session to keep its state.
func identity(c bpf.LivenessLivenessSetup) bpf.LivenessLivenessSetup {
	out := bpf.LivenessLivenessSetup{Id: c.Id, Ifindex: c.Ifindex, On: c.On, Sends: c.Sends, Judges: c.Judges, Echo: c.Echo, Observe: c.Observe, Key: c.Key}
	out.Frame.Ip, out.Frame.Seg = c.Frame.Ip, c.Frame.Seg
	return out
}

// putSession writes a session to the maps. The session keeps its state unless its identity changes.
func putSession(m map[string]*ebpf.Map, s Session, p location, key [2]uint64) error {
	var have bpf.LivenessLivenessSetup
	if err := m[pinSetups].Lookup(p.index, &have); err != nil {
		return fmt.Errorf("reading session %d: %w", p.index, err)
	}
	want := s.setup(p, key, have.Life)
	if have == want {
		return putID(m, s.ID, p.index)
	}
	if identity(have) != identity(want) {
		if err := replaceSession(m, p.index, have, want); err != nil {
			return err
		}
		// Later than any incarnation before, even with two changes in one clock tick.
		want = s.setup(p, key, max(uint64(time.Now().UnixNano()), have.Life+1))
	}
	if err := m[pinSetups].Put(p.index, want); err != nil {
		return fmt.Errorf("configuring session %d: %w", p.index, err)
	}
	return putID(m, s.ID, p.index)
}

func putID(m map[string]*ebpf.Map, id, index uint32) error {
	if err := m[pinIDs].Put(id, index); err != nil {
		return fmt.Errorf("numbering session %d: %w", index, err)
	}
	return nil
}

// replaceSession replaces a session by another one. If the old session was down, the new one starts down: neither a
// new configuration nor a recreated device proves the link.
func replaceSession(m map[string]*ebpf.Map, index uint32, have, want bpf.LivenessLivenessSetup) error {
	anew := have.Ifindex != want.Ifindex
	if have.Ifindex == 0 || anew && deviceExists(have.Ifindex) || have.Observe != 0 || want.Observe != 0 {
		return clearSession(m, index)
	}
	was := &bpf.LivenessLivenessState{}
	if err := m[pinStates].Lookup(index, was); err != nil {
		return fmt.Errorf("reading session %d: %w", index, err)
	}
	phase := max(was.Sender.Phase, was.Peer.Phase)
	if phase != phaseDown && !(anew && phase == phaseUp) {
		return clearSession(m, index)
	}
	begin := &bpf.LivenessLivenessState{}
	found := bpf.LivenessLivenessJudgement{Phase: phaseDown, Since: max(was.Sender.Since, was.Peer.Since)}
	if phase == phaseUp { // its device is gone, so it was about to fail
		found.Since = kernel.Monotonic()
	}
	if want.Sends != 0 {
		begin.Sender = found
	}
	if want.Judges != 0 {
		begin.Peer = found
	}
	err := forgetSession(m, index, have.Id, bpf.LivenessLivenessSetup{Life: have.Life, Ifindex: have.Ifindex}, begin)
	if err != nil || !anew {
		return err
	}
	return freeDevice(m, index, have.Ifindex)
}

// deviceExists reports whether the namespace has a device with an index.
func deviceExists(index uint32) bool {
	_, err := netlink.LinkByIndex(int(index))
	return !errors.As(err, &netlink.LinkNotFoundError{})
}

// freeDevice clears a session's results for a device. Observing sessions have no link state to clear.
func freeDevice(m map[string]*ebpf.Map, index, device uint32) error {
	if err := m[pinMoves].Put(links.Slot(int(device)), bpf.LivenessLivenessMove{}); err != nil {
		return fmt.Errorf("forgetting session %d: %w", index, err)
	}
	return links.ClearProbe(m[pinLinks], int(device))
}

// clearSession clears a session in the maps, and releases its link for the data path.
func clearSession(m map[string]*ebpf.Map, index uint32) error {
	var have bpf.LivenessLivenessSetup
	if err := m[pinSetups].Lookup(index, &have); err != nil {
		return fmt.Errorf("reading session %d: %w", index, err)
	}
	off := bpf.LivenessLivenessSetup{Life: have.Life}
	if have == off {
		return nil
	}
	if err := forgetSession(m, index, have.Id, off, &bpf.LivenessLivenessState{}); err != nil {
		return err
	}
	if have.Ifindex == 0 {
		return nil
	}
	if err := m[pinMoves].Put(links.Slot(int(have.Ifindex)), bpf.LivenessLivenessMove{}); err != nil {
		return fmt.Errorf("forgetting session %d: %w", index, err)
	}
	if have.Observe != 0 {
		return nil
	}
	return links.ClearProbe(m[pinLinks], int(have.Ifindex))
}

// forgetSession removes a session from the maps. The next session at this index starts with the state begin. off
// names the device with a link state still to clear, in case of a kill.
func forgetSession(m map[string]*ebpf.Map, index, id uint32, off bpf.LivenessLivenessSetup, begin *bpf.LivenessLivenessState) error {
	if err := m[pinSetups].Put(index, off); err != nil {
		return fmt.Errorf("ending session %d: %w", index, err)
	}
	if err := m[pinIDs].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("ending session %d: %w", index, err)
	}
	// No tick that saw the session on may write after this.
	kernel.WaitForPrograms()
	if err := m[pinStates].Put(index, begin); err != nil {
		return fmt.Errorf("forgetting session %d: %w", index, err)
	}
	return nil
}

// closing makes a running session announce its end. said reports whether it has done so three times, in probes and
// answers, because two may be lost.
func closing(m map[string]*ebpf.Map, index uint32) (interval time.Duration, said func() bool, err error) {
	var c bpf.LivenessLivenessSetup
	before, now := &bpf.LivenessLivenessState{}, &bpf.LivenessLivenessState{}
	said = func() bool { return true }
	if err := errors.Join(m[pinSetups].Lookup(index, &c), m[pinStates].Lookup(index, before)); err != nil {
		return 0, said, fmt.Errorf("reading session %d: %w", index, err)
	}
	if c.On == 0 {
		return 0, said, nil
	}
	c.Closing = 1
	if err := m[pinSetups].Put(index, c); err != nil {
		return 0, said, fmt.Errorf("closing session %d: %w", index, err)
	}
	const times = 3
	return time.Duration(c.Interval), func() bool {
		if err := m[pinStates].Lookup(index, now); err != nil {
			return true
		}
		probed := c.Sends == 0 || now.Seq-before.Seq >= times
		answered := c.Judges == 0 || before.LastSeen == 0 || now.Heard-before.Heard >= times
		return probed && answered
	}, nil
}
