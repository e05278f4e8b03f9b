// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// hold is a TAP device, to which the data path redirects the packets of parked flows. With a virtio header (IFF_VNET_HDR)
// segments that the kernel has merged come and go as one, and checksums stay partial.
type hold struct {
	fd      int
	ifindex int
	buf     []byte
	mu      sync.Mutex
	// services and queues by what a frame says.
	services map[listen]Service
	queues   map[Key]*queue
	bytes    int
	dropped  uint64 // for want of room
}

// queue is the packets of a flow, in the order in which they came.
type queue struct{ frames [][]byte }

// Limits of what is parked. More is dropped: the client sends it again.
const (
	mostOfFlow = 8 << 20 // bytes
	mostHeld   = 256 << 20
)

const (
	vnetHeader = 10         // bytes: struct virtio_net_hdr
	mostFrame  = 1<<16 + 64 // a merged segment, and headers
)

// newHold makes the device, or takes the one that is there. stays: it is there without us, too.
func newHold(name string, stays bool) (*hold, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: /dev/net/tun: %w (the kernel needs CONFIG_TUN)", errHold, err)
	}
	h := &hold{fd: fd, buf: make([]byte, mostFrame+vnetHeader), services: map[listen]Service{}, queues: map[Key]*queue{}}
	if err := h.setUp(name, stays); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%w %s: %w", errHold, name, err)
	}
	return h, nil
}

func (h *hold) setUp(name string, stays bool) error {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(h.fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("TUNSETIFF: %w (is another front end here?)", err)
	}
	if stays {
		if err := unix.IoctlSetInt(h.fd, unix.TUNSETPERSIST, 1); err != nil {
			return fmt.Errorf("TUNSETPERSIST: %w", err)
		}
	}
	const offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
	if err := unix.IoctlSetInt(h.fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return fmt.Errorf("TUNSETOFFLOAD: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr.SetUint32(8192)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFTXQLEN, ifr); err != nil {
		return fmt.Errorf("its queue's length: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_NOARP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("setting it up: %w", err)
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	h.ifindex = i.Index
	return nil
}

func (h *hold) close() { unix.Close(h.fd) }

// Park has packets of a flow wait, from now on: in the device's queue until Collect, then here, until Unpark.
func (f *Front) Park(k Key) error {
	f.hold.mu.Lock()
	defer f.hold.mu.Unlock()
	if f.hold.queues[k] == nil {
		f.hold.queues[k] = &queue{}
	}
	_, err := f.change(k, kernel.Monotonic()+uint64(f.parkFor), 0, func(fl *Flow) { fl.Parked = true })
	if err != nil {
		f.hold.forget(k)
	}
	return err
}

// Unpark lets the packets of a flow go to its owner, in the order in which they came, and then has those that come go there at
// once. It returns how many waited.
func (f *Front) Unpark(k Key) (waited int, err error) {
	h := f.hold
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.collect(); err != nil {
		return 0, err
	}
	q := h.forget(k) // what is collected from here on goes at once
	waited = len(q)
	for _, frame := range q {
		err = errors.Join(err, h.write(frame))
	}
	// Those that came meanwhile first, and then the way is open; a few may have slipped in between.
	err = errors.Join(err, h.collect())
	_, e := f.Change(k, func(fl *Flow) { fl.Parked = false })
	return waited, errors.Join(err, e, h.collect())
}

// forget ends a queue, and returns what was in it.
func (h *hold) forget(k Key) [][]byte {
	q := h.queues[k]
	delete(h.queues, k)
	if q == nil {
		return nil
	}
	h.bytes -= q.size()
	return q.frames
}

// Collect takes packets out of the device's queue, which is short: see Ready.
func (f *Front) Collect() error {
	f.hold.mu.Lock()
	defer f.hold.mu.Unlock()
	return f.hold.collect()
}

// Ready is a file whose SyscallConn waits for packets to collect: in the runtime's poller, not in a thread that keeps its P and has
// Go's monitor take it back. It is the caller's.
func (f *Front) Ready() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(f.hold.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errHold, err)
	}
	return os.NewFile(uintptr(fd), "hold"), nil
}

// collect reads what the device has. Packets of flows that do not wait any more go on at once.
func (h *hold) collect() error {
	for {
		n, err := unix.Read(h.fd, h.buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("%w: %w", errHold, err)
		}
		frame := h.buf[:n]
		q := h.queueOf(frame)
		switch {
		case q == nil:
			if err := h.write(frame); err != nil {
				return err
			}
		case h.bytes+n > mostHeld || q.size()+n > mostOfFlow:
			h.dropped++
		default:
			h.bytes += n
			q.frames = append(q.frames, append([]byte(nil), frame...))
		}
	}
}

func (q *queue) size() (n int) {
	for _, f := range q.frames {
		n += len(f)
	}
	return n
}

func (h *hold) write(frame []byte) error {
	if _, err := unix.Write(h.fd, frame); err != nil {
		return fmt.Errorf("%w: letting a packet go: %w", errHold, err)
	}
	return nil
}

// queueOf finds the queue of a frame's flow; nil: it does not wait.
func (h *hold) queueOf(frame []byte) *queue {
	from, to, proto, ok := endsOf(frame[min(vnetHeader, len(frame)):])
	if !ok {
		return nil
	}
	s, ok := h.services[listen{to, proto}]
	if !ok {
		return nil
	}
	if s.BySource {
		from = netip.AddrPortFrom(from.Addr(), 0)
	}
	return h.queues[Key{Client: from, Service: s.ID}]
}

// listen is where a service is.
type listen struct {
	addr  netip.AddrPort
	proto uint8
}

// endsOf are the source and the destination of an Ethernet frame of TCP or UDP, as the data path has parked it: without tags
// and extension headers.
func endsOf(b []byte) (from, to netip.AddrPort, proto uint8, ok bool) {
	if len(b) < 14+20 {
		return from, to, 0, false
	}
	port := func(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
	switch ip := b[14:]; port(b[12:]) {
	case unix.ETH_P_IP:
		l4 := int(ip[0]&15) * 4
		if len(ip) < l4+4 {
			return from, to, 0, false
		}
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:])), port(ip[l4:])),
			netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[16:])), port(ip[l4+2:])), ip[9], true
	case unix.ETH_P_IPV6:
		if len(ip) < 44 {
			return from, to, 0, false
		}
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(ip[8:])), port(ip[40:])),
			netip.AddrPortFrom(netip.AddrFrom16([16]byte(ip[24:])), port(ip[42:])), ip[6], true
	}
	return from, to, 0, false
}
