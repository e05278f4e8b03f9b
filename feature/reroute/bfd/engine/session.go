// SPDX-License-Identifier: Apache-2.0

// Package engine has the kernel run BFD sessions: send, receive, authenticate, judge and come up again, by the state machine of
// package bfd, at the ticks of liveness's tick source. User space says which sessions there are, and may look.
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

// Session is one that the kernel is to run.
type Session struct {
	bfd.Config
	Local, Peer netip.Addr // of one family; a link-local one without a zone
	Ifindex     int        // of the device
	Link        int        // the same where the session judges its link (package links), else 0
	SourcePort  uint16     // from bfd.FirstSourcePort on, of each session another one; 0: its own, or one that is free, by chance
	Key         *bfd.Key   // nil: without authentication
	// Echo is the least time between echo packets, which are sent where the neighbour says that it loops them back: whole
	// microseconds; 0: none.
	Echo time.Duration

	// LinkDown has a new session begin with the verdict that its link is down, which it revises once it is up.
	LinkDown bool
}

// maxSessions is how many a network namespace may have.
const maxSessions = 1024

// Validate says what is wrong with a session.
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
		return fmt.Errorf("echo interval %s: take whole microseconds", s.Echo)
	}
	if s.Key != nil {
		return s.Key.Validate()
	}
	return nil
}

// raw is the session as the programs read it.
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

// swap turns a port into network byte order.
func swap(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// words is an address in network byte order, an IPv4 one in the first word.
func words(a netip.Addr) (w [4]uint32) {
	for i, b := 0, a.AsSlice(); len(b) >= 4; i, b = i+1, b[4:] {
		w[i] = binary.NativeEndian.Uint32(b)
	}
	return w
}

// address is what words made.
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

// Status is what a session is.
type Status struct {
	State        bfd.State
	Diag         bfd.Diag
	Remote       bfd.Remote
	Polling      bool
	Since        time.Duration // CLOCK_MONOTONIC, as all times here
	Heard        time.Duration // 0: nothing yet
	Interval     time.Duration // between packets that it sends; 0: it sends none
	Detection    time.Duration // how long nothing may come; 0: nothing is expected
	Awaited      time.Duration // how long the other end waits for a packet of this one until it takes it for dead; 0: it awaits none
	BeenUp       bool          // up now, or before, and neither end has shut it down since
	LinkDown     bool          // it has found its link dead, or took that over
	Ups, Downs   uint64
	In, Out      uint64 // packets
	InBytes      uint64
	OutBytes     uint64
	NotAuthentic uint64 // packets that were, and changed nothing
	Malformed    uint64
	Echo         Echo
}

// Echo is what the echo function of a session has found.
type Echo struct {
	Interval       time.Duration // between packets; 0: none are sent, since none are wanted, or the neighbour does not say that it loops them back
	Sent, Returned uint64
	Refused        uint64        // that claimed to be ours
	RTT            time.Duration // smoothed
	Failed         bool          // as many as the multiplier did not come back, and none since
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
