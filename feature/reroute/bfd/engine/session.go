// SPDX-License-Identifier: Apache-2.0

// Package engine runs BFD sessions in the kernel: it sends, receives, authenticates and judges by the state machine
// of package bfd. It runs in the ticks of liveness' tick source. User space configures the sessions and can read
// their state.
package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
)

// Session configures a session in the kernel.
type Session struct {
	bfd.Config
	Local, Peer netip.Addr // of one family; link-local ones without a zone
	Ifindex     int        // of the device
	Link        int        // the same to judge the link (package links), else 0
	SourcePort  uint16     // from bfd.FirstSourcePort, unique per session; 0: keep the current port, or pick a free one at random
	Key         *bfd.Key   // nil: without authentication
	// Echo is the shortest time between echo packets, in whole microseconds; 0: none. They are sent if the neighbour
	// announces to loop them back.
	Echo time.Duration

	// LinkDown starts a new session with a dead link. The verdict changes once the session is up.
	LinkDown bool
}

// maxSessions is the limit of sessions in a network namespace.
const maxSessions = 1024

// Validate returns the first error of a session.
func (s *Session) Validate() error {
	if err := s.Config.Validate(); err != nil {
		return err
	}
	switch {
	case !s.Local.IsValid() || !s.Peer.IsValid() || s.Local.Is4() != s.Peer.Is4():
		return fmt.Errorf("from %s to %s: want two addresses of one family", s.Local, s.Peer)
	case s.Local.IsUnspecified() || s.Peer.IsUnspecified() || s.Peer.IsMulticast():
		return fmt.Errorf("from %s to %s: want an address of each end", s.Local, s.Peer)
	case s.Ifindex <= 0:
		return errors.New("no device")
	case s.SourcePort < bfd.FirstSourcePort:
		return fmt.Errorf("source port %d: want %d or more", s.SourcePort, bfd.FirstSourcePort)
	}
	if s.Echo < 0 || s.Echo != time.Duration(micros(s.Echo))*time.Microsecond {
		return fmt.Errorf("echo interval %s: use whole microseconds", s.Echo)
	}
	if s.Key != nil {
		return s.Key.Validate()
	}
	return nil
}

// raw converts the session for the programs.
func (s *Session) raw(generation uint32) bpf.BfdBfdSetup {
	r := bpf.BfdBfdSetup{Generation: generation, Ifindex: uint32(s.Ifindex), Link: uint32(s.Link), Mine: s.Discriminator,
		DesiredTx: micros(s.DesiredTx), RequiredRx: micros(s.RequiredRx), EchoRx: micros(s.EchoRx), Multiplier: s.Multiplier,
		Passive: bit(s.Passive), Down: bit(s.Down), Ipv6: bit(s.Peer.Is6()), SourcePort: swap(s.SourcePort),
		Local: words(s.Local), Peer: words(s.Peer)}
	if s.Key != nil {
		r.Auth, r.Key = uint8(s.Key.Type), s.Key.ID
		copy(r.Secret[:], s.Key.Secret)
	}
	return r
}

func micros(d time.Duration) uint32 { return uint32(d.Microseconds()) }

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// swap converts a port to network byte order.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// words converts an address to network byte order, IPv4 in the first word.
func words(a netip.Addr) (w [4]uint32) {
	for i, b := 0, a.AsSlice(); len(b) >= 4; i, b = i+1, b[4:] {
		w[i] = binary.NativeEndian.Uint32(b)
	}
	return w
}

// address is the inverse of words.
func address(w [4]uint32, ipv6 bool) netip.Addr {
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	if ipv6 {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[:4]))
}

// Status is the state of a session.
type Status struct {
	State        bfd.State
	Diag         bfd.Diag
	Remote       bfd.Remote
	Polling      bool
	Since        time.Duration // CLOCK_MONOTONIC, like all times here
	Heard        time.Duration // 0: nothing yet
	Interval     time.Duration // between sent packets; 0: it sends none
	Detection    time.Duration // longest accepted silence of the peer; 0: no packets are expected
	Awaited      time.Duration // the peer's detection time for this end; 0: the peer expects no packets
	BeenUp       bool          // up since the last shutdown of either end
	LinkDown     bool          // it found its link dead, or took over that verdict
	Ups, Downs   uint64
	In, Out      uint64 // packets
	InBytes      uint64
	OutBytes     uint64
	NotAuthentic uint64 // rejected packets, as unauthentic
	Malformed    uint64
	Echo         Echo
}

// Echo is the state of a session's echo function.
type Echo struct {
	Interval       time.Duration // between packets; 0: none are sent, because none are wanted or the neighbour does not announce to loop them back
	Sent, Returned uint64
	Refused        uint64        // packets with a wrong identification
	RTT            time.Duration // smoothed
	Failed         bool          // multiplier packets in a row were lost, and none has returned since
	Failures       uint64
}

func newStatus(c *bpf.BfdBfdSetup, s *bpf.BfdBfdState, e *bpf.BfdBfdEcho) Status {
	fromMicros := func(v uint32) time.Duration { return time.Duration(v) * time.Microsecond }
	const demand, independent = 2, 8
	out := Status{State: bfd.State(s.State), Diag: bfd.Diag(s.Diag), Polling: s.Poll != 0, Since: time.Duration(s.Since), Heard: time.Duration(s.Heard),
		Remote: bfd.Remote{State: bfd.State(s.RemoteState), Diag: bfd.Diag(s.RemoteDiag), Discriminator: s.Yours, Multiplier: s.RemoteMultiplier,
			DesiredTx: fromMicros(s.RemoteTx), RequiredRx: fromMicros(s.RemoteRx), EchoRx: fromMicros(s.RemoteEchoRx),
			Demand: s.RemoteBits&demand != 0, Independent: s.RemoteBits&independent != 0},
		Ups: s.Ups, Downs: s.Downs, In: s.In, Out: s.Out, InBytes: s.InBytes, OutBytes: s.OutBytes, NotAuthentic: s.NotAuthentic, Malformed: s.Malformed}
	out.BeenUp = s.WasUp == hasBeenUp
	out.LinkDown = out.BeenUp && (out.State != bfd.Up || e.Failed != 0) && out.State != bfd.AdminDown && out.Remote.State != bfd.AdminDown
	out.Interval, out.Detection = fromMicros(interval(c, s)), 0
	out.Awaited = time.Duration(c.Multiplier) * out.Interval
	if (out.State == bfd.Init || out.State == bfd.Up) && s.RxInUse != 0 {
		out.Detection = time.Duration(s.RemoteMultiplier) * fromMicros(max(s.RxInUse, s.RemoteTx))
	}
	out.Echo = Echo{Sent: e.Sent, Returned: e.Returned, Refused: e.Refused, RTT: time.Duration(e.Rtt), Failed: e.Failed != 0, Failures: e.Failures}
	if e.Wanted != 0 && s.RemoteEchoRx != 0 && out.State == bfd.Up && out.Remote.State == bfd.Up {
		out.Echo.Interval = fromMicros(max(e.Wanted, s.RemoteEchoRx))
	}
	return out
}

// interval is bfd_interval of session.h.
func interval(c *bpf.BfdBfdSetup, s *bpf.BfdBfdState) uint32 {
	tx := c.DesiredTx
	if bfd.State(s.State) != bfd.Up {
		tx = max(tx, uint32(bfd.SlowTx.Microseconds()))
	}
	demanded := s.RemoteBits&2 != 0 && bfd.State(s.State) == bfd.Up && bfd.State(s.RemoteState) == bfd.Up && s.Poll == 0
	if c.Passive != 0 && s.Yours == 0 || s.RemoteRx == 0 || demanded {
		return 0
	}
	if s.Poll != 0 && s.TxFloor != 0 {
		tx = min(tx, s.TxFloor)
	}
	return max(tx, s.RemoteRx)
}
