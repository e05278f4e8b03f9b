// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants missing from x/sys/unix (linux/tls.h, linux/sock_diag.h).
const (
	tlsTx         = 1
	tlsRx         = 2
	tlsZeroCopy   = 3 // Linux 5.19
	tlsNoPad      = 4 // Linux 6.0
	tlsMaxPayload = 5 // Linux 6.19

	tlsInfoLen       = 4  // struct tls_crypto_info: version (2), cipher (2)
	tlsSetRecordType = 1  // control message
	tlsData          = 23 // record type: application data

	memReceive = 0 // index in SO_MEMINFO: memory of the receive queue and out-of-order segments
	memBacklog = 7
)

// DefaultQuiet is the default time to wait for a kTLS session to become idle.
const DefaultQuiet = 20 * time.Millisecond

// Quiesce waits until a kTLS session is idle, for at most o.Quiet, while its packets still arrive. It is for callers
// that block packets before [Dump]; Dump checks again. It returns at once for other sessions, and for sessions that
// Dump rejects for another reason.
func Quiesce(fd int, o DumpOptions) error {
	if name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP); err != nil || name != "tls" {
		return nil
	}
	s, tls, err := admit(fd, o)
	if err != nil || !tls {
		return nil
	}
	if err := quiesce(fd, o); err != nil {
		return fmt.Errorf("dump %s: %w", s.Flow(), err)
	}
	return nil
}

func quiesce(fd int, o DumpOptions) error {
	quiet := o.Quiet
	if quiet == 0 {
		quiet = DefaultQuiet
	}
	end := time.Now().Add(quiet)
	for {
		k, err := readKeys(fd)
		if err == nil {
			err = k.flush(fd)
		}
		if err == nil {
			err = k.still(fd)
		}
		if !errors.Is(err, errTLSBusy) || time.Now().After(end) {
			return err
		}
		time.Sleep(min(500*time.Microsecond, max(quiet, 0)))
	}
}

// readTLS reads the keys of an idle socket in repair mode.
func (s *State) readTLS(fd int) error {
	k, err := readKeys(fd)
	if err != nil {
		return err
	}
	s.TLS = k
	return k.still(fd)
}

// readKeys reads the current keys from the kernel. The sequence number is the next record's.
func readKeys(fd int) (*TLS, error) {
	k := &TLS{}
	for _, way := range []struct {
		opt  int
		keys *Keys
	}{{tlsTx, &k.Tx}, {tlsRx, &k.Rx}} {
		var info [tlsInfoLen]byte
		if err := getBytes(fd, way.opt, info[:]); errors.Is(err, unix.EBUSY) {
			continue // handled by the application
		} else if err != nil {
			return nil, fmt.Errorf("read the TLS keys: %w", err)
		}
		k.Version, k.Cipher = binary.NativeEndian.Uint16(info[:]), binary.NativeEndian.Uint16(info[2:])
		c := findCipher(k.Cipher)
		if c == nil {
			return nil, fmt.Errorf("%w: cipher %d is unknown to this weir", errTLS, k.Cipher)
		}
		b := make([]byte, tlsInfoLen+c.size())
		if err := getBytes(fd, way.opt, b); errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("%w: it does not report the keys of %s (a newer kernel may)", errTLS, c.name)
		} else if err != nil {
			return nil, fmt.Errorf("read the TLS keys: %w", err)
		}
		*way.keys = b[tlsInfoLen:]
	}
	return k, k.readFlags(fd)
}

func (k *TLS) readFlags(fd int) error {
	var on uint32
	if k.Tx != nil {
		if err := get(fd, unix.SOL_TLS, tlsZeroCopy, &on); err == nil {
			k.ZeroCopy = on != 0
		} else if !absent(err) {
			return fmt.Errorf("read TLS_TX_ZEROCOPY_RO: %w", err)
		}
		if err := get(fd, unix.SOL_TLS, tlsMaxPayload, &k.MaxPayload); err != nil && !absent(err) {
			return fmt.Errorf("read TLS_TX_MAX_PAYLOAD_LEN: %w", err)
		} else if k.MaxPayload == maxTLSRecord {
			k.MaxPayload = 0
		}
	}
	if k.Rx == nil {
		return nil
	}
	// Kernels before Linux 6.0, which added the option, hide partially received records.
	switch err := get(fd, unix.SOL_TLS, tlsNoPad, &on); {
	case err == nil:
		k.NoPad = on != 0
	case absent(err):
		return fmt.Errorf("%w: partially received records, before Linux 6.0: run a newer kernel, or let the application decrypt", errTLS)
	case !errors.Is(err, unix.EINVAL) || k.Version == tlsVersion13: // the option does not exist for TLS 1.2
		return fmt.Errorf("read TLS_RX_EXPECT_NO_PAD: %w", err)
	}
	return nil
}

// flush makes the kernel send a record that waits for more data (MSG_MORE). Such a record is not detectable.
func (k *TLS) flush(fd int) error {
	if k.Tx == nil {
		return nil
	}
	// An empty message with a record type ends the previous record. Package unix would add a byte.
	control := make([]byte, unix.CmsgSpace(1))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	h.Level, h.Type = unix.SOL_TLS, tlsSetRecordType
	h.SetLen(unix.CmsgLen(1))
	control[unix.CmsgLen(0)] = tlsData
	m := unix.Msghdr{Control: &control[0]}
	m.SetControllen(len(control))
	_, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 && errno != unix.EAGAIN && errno != unix.EINTR { // in these cases the data before it is unacknowledged
		return fmt.Errorf("send the unfinished record: %w", errno)
	}
	return nil
}

// decrypts reports whether the kernel decrypts the session's records. Its queues are then unreadable.
func decrypts(fd int) bool {
	var info [tlsInfoLen]byte
	return getBytes(fd, tlsRx, info[:]) == nil
}

// still checks for a session without data in flight, as far as the kernel reports it. Otherwise the error wraps
// [errTLSBusy].
func (k *TLS) still(fd int) error {
	busy := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", errTLSBusy, fmt.Sprintf(format, args...))
	}
	i, err := tcpInfo(fd)
	if err != nil {
		return err
	}
	if i.State != stateEstablished {
		return busy("it is ending: %s", stateName(i.State)) // kTLS starts in no other state
	}
	if ended, err := readShutdown(fd); err != nil || ended {
		return errors.Join(err, busy("reading was shut down"))
	}
	l, err := queueLengths(fd)
	if err != nil {
		return err
	}
	if k.configured() && l.unacked != 0 {
		return busy("%d unacknowledged bytes", l.unacked)
	}
	if k.Rx == nil {
		return nil
	}
	if l.unread != 0 {
		return busy("%d unread bytes of records", l.unread)
	}
	var mem [9]uint32
	if err := get(fd, unix.SOL_SOCKET, unix.SO_MEMINFO, &mem); err != nil {
		return fmt.Errorf("SO_MEMINFO: %w", err)
	}
	if mem[memReceive]|mem[memBacklog] != 0 {
		return busy("segments arrived out of order, and one is missing")
	}
	if err := roomForRecords(fd, i); err != nil {
		return err
	}
	return nothingDecrypted(fd)
}

// roomForRecords rejects small receive buffers. With them the kernel takes partial records out of the queue, and they
// become invisible.
func roomForRecords(fd int, i info) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return fmt.Errorf("read the size of a buffer: %w", err)
	}
	if least := 4*maxTLSRecord + 4*int(i.RcvMSS); n < least {
		return fmt.Errorf("%w: partially received records, with a receive buffer of %d bytes: it needs %d (set SO_RCVBUF to half of it)", errTLS, n, least)
	}
	return nil
}

// nothingDecrypted detects decrypted data that is unread, and a key that the application must renew. poll reports the
// data; a peek reports both and consumes nothing.
func nothingDecrypted(fd int) error {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLPRI}}
	for {
		if _, err := unix.Poll(p, 0); err == nil {
			break
		} else if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	if p[0].Revents != 0 {
		return fmt.Errorf("%w: unread decrypted data", errTLSBusy)
	}
	oob := make([]byte, unix.CmsgSpace(1))
	for {
		_, _, _, _, err := unix.Recvmsg(fd, make([]byte, 1), oob, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EKEYEXPIRED):
			return fmt.Errorf("%w: the peer has changed its key: give the kernel the new one", errTLSBusy)
		case err != nil:
			return fmt.Errorf("peek at decrypted data: %w", err)
		}
		return fmt.Errorf("%w: unread decrypted data", errTLSBusy)
	}
}

// secure restores the socket's TLS. The socket is still in repair mode, without data sent or read.
func (b *Built) secure() error {
	k := b.state.TLS
	if k == nil {
		return nil
	}
	err := unix.SetsockoptString(b.fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls")
	if errors.Is(err, unix.ENOENT) || absent(err) {
		return fmt.Errorf("%w: it has no kTLS", errNoTLS)
	} else if err != nil {
		return fmt.Errorf("set TCP_ULP to tls: %w", err)
	}
	for _, way := range []struct {
		opt  int
		keys Keys
	}{{tlsTx, k.Tx}, {tlsRx, k.Rx}} {
		if way.keys == nil {
			continue
		}
		info := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, k.Version), k.Cipher)
		err := unix.SetsockoptString(b.fd, unix.SOL_TLS, way.opt, string(slices.Concat(info, way.keys)))
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || absent(err) {
			return fmt.Errorf("%w: it does not support %s (%w)", errNoTLS, k, err)
		} else if err != nil {
			return fmt.Errorf("set the keys of %s: %w", k, err)
		}
	}
	return b.setTLSFlags()
}

func (b *Built) setTLSFlags() error {
	k := b.state.TLS
	if k.MaxPayload != 0 { // the peer accepts no longer records
		v := binary.NativeEndian.AppendUint16(nil, k.MaxPayload)
		if err := unix.SetsockoptString(b.fd, unix.SOL_TLS, tlsMaxPayload, string(v)); err != nil {
			return fmt.Errorf("%w: records of at most %d bytes (TLS_TX_MAX_PAYLOAD_LEN, Linux 6.19): %w", errNoTLS, k.MaxPayload, err)
		}
	}
	for _, o := range []struct {
		opt  int
		on   bool
		name string
	}{{tlsZeroCopy, k.ZeroCopy, "TLS_TX_ZEROCOPY_RO"}, {tlsNoPad, k.NoPad, "TLS_RX_EXPECT_NO_PAD"}} {
		if !o.on {
			continue
		}
		if err := setInt(b.fd, unix.SOL_TLS, o.opt, 1); err != nil { // both only improve speed
			b.Lost = append(b.Lost, fmt.Sprintf("%s: %v", o.name, err))
		}
	}
	return nil
}

// getBytes reads an option of SOL_TLS with exactly len(b) bytes.
func getBytes(fd, opt int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_TLS, uintptr(opt), uintptr(unsafe.Pointer(&b[0])),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
