// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"net/netip"
)

// Reasons for which a session is not dumped. The socket is then as it was.
var (
	errTooLarge = errors.New("the session's queues are larger than allowed")
	errState    = errors.New("a connection in this state cannot be moved")
	errUrgent   = errors.New("the session has urgent data that is not read yet: read it, then move the session")
	errMPTCP    = errors.New("the session is MPTCP, which the kernel cannot dump: listen with SetMultipathTCP(false) or IPPROTO_TCP")
	errULP      = errors.New("the session has a protocol of the kernel's on top that is not moved; kTLS is")
	errTLS      = errors.New("the kernel cannot tell all that it knows of the session's TLS")
	errTLSBusy  = errors.New("the session's TLS is in the midst of something: have the application read all that came, and move the session when the peer has acknowledged all")
	errAO       = errors.New("the session is signed with TCP-AO, whose keys the kernel does not give away")
	errPeekOff  = errors.New("the session has SO_PEEK_OFF set, which cannot be moved: set it to -1 first")
	errMoving   = errors.New("packets of the session still arrive: stop them before the dump")
)

// Reasons for which a session is not restored. Nothing is left behind then.
var (
	errFormat  = errors.New("not a session's state")
	errVersion = errors.New("the session's state is of a version that this weir does not know: update weir here first")
	errInvalid = errors.New("the session's state contradicts itself")
	ErrInUse   = errors.New("the same connection is open here already")
	errAddress = errors.New("the session's own address is not one of this network namespace: add it to lo first")
	errRoute   = errors.New("there is no route to the session's peer")
	errNoTLS   = errors.New("this kernel cannot go on with the session's TLS (kTLS: modprobe tls; CONFIG_TLS, and the cipher's module)")
)

// defaultLimit is how many bytes of queues a state holds unless the caller says
// otherwise: above what the kernel's own tuning gives one (tcp_rmem and tcp_wmem,
// 6 + 4 MB by default, 32 + 4 MB since Linux 6.15).
const defaultLimit = 64 << 20

// Flow names a connection. Addresses of IPv4 on an IPv6 socket are IPv4 here.
type Flow struct {
	Local, Remote netip.AddrPort
}

// TCP's states as the kernel numbers them (net/tcp_states.h).
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

// Window is what TCP_REPAIR_WINDOW reads and sets (struct tcp_repair_window,
// linux/tcp.h): sequence numbers and bytes.
type Window struct {
	SndWl1    uint32 // sequence number of the segment that last changed SndWnd
	SndWnd    uint32 // what the peer lets us send, from the first byte that it has not acknowledged
	MaxWindow uint32 // the largest SndWnd of the session's life
	RcvWnd    uint32 // what we have let the peer send, from RcvWup
	RcvWup    uint32 // RcvNxt at the time when we said so
}

// Option is a socket option that moves with the session. The numbers are weir's own
// ([State.Options] says why), so that a state can set nothing else.
type Option struct {
	ID    uint8
	Value uint32 // as the kernel's int
}

// State is a session between two kernels.
type State struct {
	// Local is the session's own address, Remote the peer's. For IPv4 on an IPv6
	// socket both are IPv4-mapped, so that the socket is again one of IPv6.
	Local, Remote netip.AddrPort
	// Zone is the interface of link-local addresses, Device that of SO_BINDTODEVICE.
	// Names, since other hosts number their interfaces differently. The caller may
	// change them before the state is restored.
	Zone, Device string

	MSS                      uint16 // largest segment that the peer takes
	Timestamps, Microseconds bool   // TCP timestamps were agreed on; their clock ticks µs (else ms)
	SACK                     bool   // selective acknowledgements were agreed on
	Scaling                  bool   // window scaling was agreed on
	SndScale, RcvScale       uint8  // by how many bits the peer's and our windows are shifted, at most 14

	Timestamp uint32 // the next timestamp that the session would send
	SndUna    uint32 // sequence number of the first byte of Send
	RcvNxt    uint32 // sequence number that the peer's next byte has
	Window    Window

	// Send is what the peer has not acknowledged. The last Unsent bytes of it were
	// never sent.
	Send   []byte
	Unsent int
	// Unread is what the peer had acknowledged, and the application not read. It is
	// not put back into a socket: whoever takes the session over reads it before the
	// socket ([Conn] does). Rebuilding the receive queue would cost twice as long and
	// make the peer repeat what it has sent meanwhile.
	Unread []byte
	// EOF says that nothing comes after Unread: the peer has sent its FIN, or reading
	// was shut down. Fin says that we have ended our direction, after Send.
	EOF, Fin bool

	Congestion string // congestion control, by its name
	Linger     int    // SO_LINGER in seconds, -1 for off
	ReuseAddr  bool
	// SndBuf and RcvBuf are the buffers' sizes in bytes as getsockopt tells them;
	// a locked one was set by the application, the others grow by themselves.
	SndBuf, RcvBuf             uint32
	SndBufLocked, RcvBufLocked bool
	// Options are socket options, in the order of their ids. Ids, not the
	// kernel's names: one host must not have another set whatever it likes.
	Options []Option
	// TLS is that of a session of kTLS, else nil. It holds keys.
	TLS *TLS
}

// Flow is the session's name.
func (s *State) Flow() Flow {
	unmap := func(a netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
	}
	return Flow{unmap(s.Local), unmap(s.Remote)}
}

// announced is the window that the session announces, as it stands in a header: rounded up, so that nothing is taken back
// (tcp_select_window, net/ipv4/tcp_output.c).
func (s *State) announced() uint16 {
	free := uint64(max(0, int32(s.Window.RcvWup+s.Window.RcvWnd-s.RcvNxt)))
	return uint16(min((free+1<<s.RcvScale-1)>>s.RcvScale, 1<<16-1))
}

// maxScale is RFC 7323's limit.
const maxScale = 14

// check refuses what Build could not make a socket of, or what no dump gives. States
// come from other hosts.
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
		return bad("addresses %s and %s of two families", local, remote)
	case s.SndScale > maxScale || s.RcvScale > maxScale || !s.Scaling && (s.SndScale|s.RcvScale) != 0:
		return bad("window scales %d and %d", s.SndScale, s.RcvScale)
	case s.MSS == 0:
		return bad("no segment size")
	case s.Microseconds && !s.Timestamps:
		return bad("a clock of timestamps, but no timestamps")
	case s.Unsent < 0 || s.Unsent > len(s.Send):
		return bad("%d bytes unsent of %d", s.Unsent, len(s.Send))
	case w.MaxWindow < w.SndWnd || int32(w.SndWl1-(s.RcvNxt+w.RcvWnd)) > 0 || int32(w.RcvWup-s.RcvNxt) > 0:
		return bad("windows %+v at %d", *w, s.RcvNxt) // tcp_repair_set_window would say EINVAL
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

// checkTLS refuses what a session of kTLS cannot be: it is moved only while both directions are open and nothing is
// on its way.
func (s *State) checkTLS() error {
	switch k := s.TLS; {
	case k == nil:
	case k.problem() != "":
		return fmt.Errorf("%w: %s", errInvalid, k.problem())
	case s.EOF || s.Fin || k.configured() && len(s.Send) > 0 || k.Rx != nil && len(s.Unread) > 0:
		return fmt.Errorf("%w: a session of TLS that does not stand still", errInvalid)
	}
	return nil
}

const (
	maxBuffer = 1 << 30 // of a socket: the kernel's own limit is near
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
