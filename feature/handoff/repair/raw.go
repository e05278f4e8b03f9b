// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
)

// Values of TCP_REPAIR and TCP_REPAIR_QUEUE, and constants missing from x/sys/unix (linux/tcp.h, linux/sockios.h,
// asm-generic/socket.h).
const (
	repairOn = 1
	// repairOff makes the socket send a window probe: the peer answers with an acknowledgement. repairOffQuiet (Linux
	// 4.19) sends nothing.
	repairOff      = 0
	repairOffQuiet = -1

	queueNone = 0
	queueRecv = 1
	queueSend = 2

	siocOutqNSD = 0x894b
	soPeekOff   = 42
	lockSndBuf  = 1
	lockRcvBuf  = 2
	tcpAOInfo   = 40 // Linux 6.7

	protocolMPTCP = 262
)

// soBufLock is SO_BUF_LOCK (Linux 5.14). It is a variable because tests run without it.
var soBufLock = 72

// Needs returns the kernel facilities for moving sessions between hosts.
func Needs() []kernel.Need {
	return []kernel.Need{
		{Name: "TCP_REPAIR", Since: "4.19", For: "moving live TCP sessions between hosts",
			Remedy: "run it as root or with CAP_NET_ADMIN over the network namespace", Probe: probeRepair},
		{Name: "SO_BUF_LOCK", Since: "5.14", Optional: true, Remedy: "run a newer kernel", Probe: probeBufLock,
			For: "automatic buffer sizes of moved sessions; without it buffers keep their size"},
		{Name: "raw sockets", Since: "4.19", Optional: true, Remedy: "run it as root or with CAP_NET_RAW over the network namespace", Probe: probeRaw,
			For: "retransmitting a session's last data after a move; without it a loss around the move takes seconds to repair"},
		{Name: "kTLS", Since: "6.0", Optional: true, Remedy: "modprobe tls, or run a kernel with CONFIG_TLS, Linux 6.0 or newer", Probe: probeTLS,
			For: "moving sessions with TLS in the kernel; without it this host neither sends nor receives them"},
	}
}

func probeRepair() error {
	return onSocket(func(fd int) error {
		if err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn); err != nil {
			return explainRepair(err)
		}
		return setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOffQuiet)
	})
}

func probeBufLock() error {
	return onSocket(func(fd int) error {
		_, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soBufLock)
		return err
	})
}

func probeRaw() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err == nil {
		unix.Close(fd)
	}
	return users.Lacking(err, unix.CAP_NET_RAW)
}

// probeTLS asks for an option of Linux 6.0, because older kernels hide partially received records. The session for this
// has no peer and sends nothing (TCP_REPAIR). Without a route to 127.0.0.1 it only asks for kTLS: an unconnected socket
// gets ENOTCONN.
func probeTLS() error {
	return onSocket(func(fd int) error {
		secure := func() error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls") }
		if err := secure(); !errors.Is(err, unix.ENOTCONN) {
			return err
		}
		if setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn) != nil || unix.Connect(fd, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}) != nil {
			return nil
		}
		if err := secure(); err != nil {
			return err
		}
		if _, err := unix.GetsockoptInt(fd, unix.SOL_TLS, tlsNoPad); absent(err) {
			return errors.New("its kTLS hides partially received records")
		}
		return nil
	})
}

func onSocket(f func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}

func explainRepair(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("TCP_REPAIR: %w: run as root, or with CAP_NET_ADMIN over the socket's network namespace", err)
	}
	return fmt.Errorf("TCP_REPAIR: %w", err)
}

func setInt(fd, level, opt, value int) error { return unix.SetsockoptInt(fd, level, opt, value) }

// setTCP and getTCP pass a value in its memory layout.
func setTCP[T any](fd, opt int, v *T, count int) error {
	size := uintptr(count) * unsafe.Sizeof(*v)
	if _, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, uintptr(opt), uintptr(unsafe.Pointer(v)), size, 0); errno != 0 {
		return errno
	}
	return nil
}

func getTCP[T any](fd, opt int, v *T) error { return get(fd, unix.IPPROTO_TCP, opt, v) }

func get[T any](fd, level, opt int, v *T) error {
	size := uint32(unsafe.Sizeof(*v))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(opt), uintptr(unsafe.Pointer(v)),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// getLinger returns SO_LINGER in seconds, -1 if it is off.
func getLinger(fd int) (int, error) {
	var l unix.Linger
	if err := get(fd, unix.SOL_SOCKET, unix.SO_LINGER, &l); err != nil {
		return 0, fmt.Errorf("read SO_LINGER: %w", err)
	}
	if l.Onoff == 0 {
		return -1, nil
	}
	return int(l.Linger), nil
}

// info is the start of struct tcp_info (linux/tcp.h).
type info struct {
	State, _, _, _, _, Options uint8
	Scales                     uint8 // two fields of four bits, in the machine's bit-field order
	_                          uint8
	_                          [2]uint32
	SndMSS, RcvMSS             uint32
	Unacked                    uint32 // segments
	_                          [13]uint32
	SndCwnd                    uint32 // segments
}

// Bits of info.Options.
const (
	optionTimestamps = 1
	optionSACK       = 2
	optionScaling    = 4
	optionMicrosec   = 64 // Linux 6.7
)

func tcpInfo(fd int) (i info, err error) {
	if err := getTCP(fd, unix.TCP_INFO, &i); err != nil {
		return i, fmt.Errorf("TCP_INFO: %w", err)
	}
	return i, nil
}

// bigEndian machines order bit fields from the other end.
var bigEndian = *(*byte)(unsafe.Pointer(&[]uint16{1}[0])) == 0

func (i *info) scales() (snd, rcv uint8) {
	snd, rcv = i.Scales&15, i.Scales>>4
	if bigEndian {
		snd, rcv = rcv, snd
	}
	return snd, rcv
}

// queueSeq selects a queue and returns its next sequence number: of the next byte to arrive, or to be written by the
// application.
func queueSeq(fd, queue int) (seq uint32, err error) {
	if err = setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queue); err == nil {
		err = getTCP(fd, unix.TCP_QUEUE_SEQ, &seq)
	}
	if err != nil {
		return 0, fmt.Errorf("read a queue's sequence number: %w", err)
	}
	return seq, nil
}

func setQueueSeq(fd, queue int, seq uint32) error {
	err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queue)
	if err == nil {
		err = setTCP(fd, unix.TCP_QUEUE_SEQ, &seq, 1)
	}
	if err != nil {
		return fmt.Errorf("set a queue's sequence number: %w", err)
	}
	return nil
}

// lengths are the bytes in a socket's queues. A FIN counts as a byte of the latter two.
type lengths struct{ unread, unacked, unsent int }

func queueLengths(fd int) (l lengths, err error) {
	for _, q := range []struct {
		request uint
		n       *int
	}{{unix.SIOCINQ, &l.unread}, {unix.SIOCOUTQ, &l.unacked}, {siocOutqNSD, &l.unsent}} {
		if *q.n, err = unix.IoctlGetInt(fd, q.request); err != nil {
			return l, fmt.Errorf("read the length of a queue: %w", err)
		}
	}
	return l, nil
}
