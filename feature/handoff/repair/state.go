// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"net/netip"
)

// Reasons to reject a dump. The socket is then unchanged.
var (
	errTooLarge = errors.New("the session's queues exceed the limit")
	errState    = errors.New("a connection in this state cannot be moved")
	errUrgent   = errors.New("the session has unread urgent data: read it, then move the session")
	errMPTCP    = errors.New("the kernel cannot dump MPTCP sessions: listen with SetMultipathTCP(false) or IPPROTO_TCP")
	errULP      = errors.New("the session has an upper layer protocol other than kTLS: it cannot be moved")
	errTLS      = errors.New("the kernel does not report the complete TLS state of the session")
	errTLSBusy  = errors.New("the TLS session is busy: read all received data, and move it once the peer has acknowledged all sent data")
	errAO       = errors.New("the session uses TCP-AO: the kernel does not report its keys, so it cannot be moved")
	errPeekOff  = errors.New("the session has SO_PEEK_OFF set: set it to -1 first")
	errMoving   = errors.New("packets of the session still arrive: block them before the dump")
)

// Reasons to reject a restore. Nothing is left behind then.
var (
	errFormat  = errors.New("not a session's state")
	errVersion = errors.New("the session's state has an unknown version: update weir on this host first")
	errInvalid = errors.New("the session's state contradicts itself")
	ErrInUse   = errors.New("this connection is already open on this host")
	errAddress = errors.New("the session's local address is missing in this network namespace: add it to lo first")
	errRoute   = errors.New("no route to the session's peer")
	errNoTLS   = errors.New("this kernel cannot continue the session's TLS (modprobe tls; it needs CONFIG_TLS and the cipher's module)")
)

// defaultLimit is the default maximum of queue bytes in a state. It exceeds the kernel's automatic sizes (tcp_rmem
// and tcp_wmem: 6 + 4 MB by default, 32 + 4 MB since Linux 6.15).
const defaultLimit = 64 << 20

// Flow identifies a connection. IPv4 addresses of an IPv6 socket are IPv4 here.
type Flow struct {
	Local, Remote netip.AddrPort
}

// TCP states in the kernel's numbering (net/tcp_states.h).
const (
	stateEstablished = 1
	stateFinWait1    = 4
	stateFinWait2    = 5
	stateCloseWait   = 8
	stateLastAck     = 9
	stateClosing     = 11
)

var stateNames = [...]string{0: "no state", 1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2",
	6: "TIME_WAIT", 7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING", 12: "NEW_SYN_RECV"}

func stateName(s uint8) string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", s)
}

// Window is struct tcp_repair_window (linux/tcp.h), for TCP_REPAIR_WINDOW: sequence numbers and bytes.
type Window struct {
	SndWl1    uint32 // sequence number of the last segment to change SndWnd
	SndWnd    uint32 // the peer's window, from its first unacknowledged byte
	MaxWindow uint32 // largest SndWnd of the session
	RcvWnd    uint32 // the window announced to the peer, from RcvWup
	RcvWup    uint32 // RcvNxt at that announcement
}

// Option is a socket option of the session. IDs are weir's own, so a state can set no other option (see
// [State.Options]).
type Option struct {
	ID    uint8
	Value uint32 // the kernel's int
}

// State is a session between two kernels.
type State struct {
	// Local is the session's own address, Remote the peer's. For IPv4 on an IPv6 socket both are IPv4-mapped, and the
	// restored socket is IPv6 again.
	Local, Remote netip.AddrPort
	// Zone is the interface of link-local addresses, Device the interface of SO_BINDTODEVICE. They are names, because
	// indexes differ between hosts. The caller may change them before the restore.
	Zone, Device string

	MSS                      uint16 // largest segment accepted by the peer
	Timestamps, Microseconds bool   // TCP timestamps are in use; their unit is µs (otherwise ms)
	SACK                     bool   // selective acknowledgements are in use
	Scaling                  bool   // window scaling is in use
	SndScale, RcvScale       uint8  // shifts of the peer's and the own windows, in bits, at most 14

	Timestamp uint32 // the session's next timestamp
	SndUna    uint32 // sequence number of the first byte of Send
	RcvNxt    uint32 // sequence number of the peer's next byte
	Window    Window

	// Send is the unacknowledged data. Its last Unsent bytes were never sent.
	Send   []byte
	Unsent int
	// Unread is acknowledged data that the application has not read. It is not restored into the socket: the new
	// owner reads it first ([Conn] does). Rebuilding the receive queue would take twice as long, and make the peer
	// retransmit data sent in the meantime.
	Unread []byte
	// EOF means no data follows Unread: the peer has sent its FIN, or reading was shut down. Fin means the session
	// has ended its own direction, after Send.
	EOF, Fin bool

	Congestion string // name of the congestion control
	Linger     int    // SO_LINGER in seconds, -1 for off
	ReuseAddr  bool
	// SndBuf and RcvBuf are buffer sizes in bytes, in getsockopt's accounting. A locked size was set by the
	// application. The others grow automatically.
	SndBuf, RcvBuf             uint32
	SndBufLocked, RcvBufLocked bool
	// Options are socket options, ordered by ID. IDs in place of the kernel's names keep a host from setting
	// arbitrary options at another.
	Options []Option
	// TLS is set for kTLS sessions. It contains keys.
	TLS *TLS
}

// Flow returns the session's addresses.
func (s *State) Flow() Flow {
	unmap := func(a netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
	}
	return Flow{unmap(s.Local), unmap(s.Remote)}
}

// announced returns the session's announced window in a header's unit. It is rounded up, because a window must not
// shrink (tcp_select_window, net/ipv4/tcp_output.c).
func (s *State) announced() uint16 {
	free := uint64(max(0, int32(s.Window.RcvWup+s.Window.RcvWnd-s.RcvNxt)))
	return uint16(min((free+1<<s.RcvScale-1)>>s.RcvScale, 1<<16-1))
}

// maxScale is RFC 7323's limit.
const maxScale = 14

// check rejects states that Build cannot restore or no dump produces. States come from other hosts.
func (s *State) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", errInvalid, fmt.Sprintf(format, args...))
	}
	for _, a := range []netip.AddrPort{s.Local, s.Remote} {
		ip := a.Addr().Unmap()
		if !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || a.Port() == 0 || a.Addr().Zone() != "" {
			return bad("address %s", a)
		}
	}
	w := &s.Window
	switch local, remote := s.Local.Addr(), s.Remote.Addr(); {
	case local.Is4() != remote.Is4() || local.Is4In6() != remote.Is4In6():
		return bad("addresses %s and %s of different families", local, remote)
	case s.SndScale > maxScale || s.RcvScale > maxScale || !s.Scaling && (s.SndScale|s.RcvScale) != 0:
		return bad("window scales %d and %d", s.SndScale, s.RcvScale)
	case s.MSS == 0:
		return bad("no segment size")
	case s.Microseconds && !s.Timestamps:
		return bad("a timestamp clock without timestamps")
	case s.Unsent < 0 || s.Unsent > len(s.Send):
		return bad("%d bytes unsent of %d", s.Unsent, len(s.Send))
	case w.MaxWindow < w.SndWnd || int32(w.SndWl1-(s.RcvNxt+w.RcvWnd)) > 0 || int32(w.RcvWup-s.RcvNxt) > 0:
		return bad("windows %+v at %d", *w, s.RcvNxt) // tcp_repair_set_window would return EINVAL
	case s.Linger < -1 || s.Linger > 1<<16:
		return bad("linger %d s", s.Linger)
	case s.SndBuf > maxBuffer || s.RcvBuf > maxBuffer:
		return bad("buffers of %d and %d bytes", s.SndBuf, s.RcvBuf)
	case len(s.Congestion) > maxName || len(s.Zone) > maxName || len(s.Device) > maxName:
		return bad("a name of more than %d bytes", maxName)
	}
	if err := s.checkTLS(); err != nil {
		return err
	}
	return s.checkOptions()
}

// checkTLS rejects impossible kTLS states: a kTLS session moves only with both directions open and no data in flight.
func (s *State) checkTLS() error {
	switch k := s.TLS; {
	case k == nil:
	case k.problem() != "":
		return fmt.Errorf("%w: %s", errInvalid, k.problem())
	case s.EOF || s.Fin || k.configured() && len(s.Send) > 0 || k.Rx != nil && len(s.Unread) > 0:
		return fmt.Errorf("%w: a TLS session with data in flight", errInvalid)
	}
	return nil
}

const (
	maxBuffer = 1 << 30 // per socket, near the kernel's own limit
	maxName   = 15      // TCP_CA_NAME_MAX and IFNAMSIZ, less the NUL
)

func (s *State) checkOptions() error {
	last := 0
	for _, o := range s.Options {
		if int(o.ID) <= last {
			return fmt.Errorf("%w: option %d after %d", errInvalid, o.ID, last)
		}
		last = int(o.ID)
	}
	return nil
}
