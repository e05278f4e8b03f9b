// SPDX-License-Identifier: Apache-2.0

// Package packetbuf is a device in which packets of sessions that move wait: at a load balancer, and at the backend that a session leaves.
// The data path redirects them to it, and they are taken out and put back as Ethernet frames.
package packetbuf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// errDevice is part of each error of a device.
var errDevice = errors.New("the device of buffered packets")

// Limits of what waits. More is dropped: the client sends it again.
const (
	maxPerFlow  = 8 << 20 // bytes
	maxBuffered = 256 << 20
)

// maxCollected is how many packets are taken out of the device's own queue at a time. It holds no more: what comes meanwhile may be
// what was put back.
const maxCollected = queueLength

const queueLength = 8192 // packets

const (
	vnetHeader = 10         // bytes: struct virtio_net_hdr
	maxFrame   = 1<<16 + 64 // a merged segment, and headers
)

// Device is a TAP device whose packets wait by flow, in the order in which they came. With a virtio header (IFF_VNET_HDR) segments
// that the kernel has merged come and go as one, and checksums stay partial.
type Device[K comparable] struct {
	Ifindex int

	fd      int
	of      func(from, to netip.AddrPort, proto uint8) (K, bool)
	mu      sync.Mutex
	buf     []byte
	queues  map[K]*queue
	bytes   int
	dropped uint64 // for want of room
}

// queue is the packets of a flow.
type queue struct {
	frames [][]byte
	bytes  int
}

// predecessor is how long an agent waits for the device of a predecessor that was killed and still ends.
const predecessor = 3 * time.Second

// Again calls open, which makes a device, until a predecessor no longer holds it: for a few seconds at most.
func Again[K comparable](open func() (*Device[K], error)) (d *Device[K], err error) {
	for end := time.Now().Add(predecessor); ; time.Sleep(predecessor / 60) {
		d, err = open()
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return d, err
		}
	}
}

// New makes the device in the network namespace of the calling thread, or takes the one that is there. stays: it is there without this
// process, too. of finds the flow of a packet of TCP or UDP, by its source, its destination and the protocol; it may be called at any
// time.
func New[K comparable](name string, stays bool, of func(from, to netip.AddrPort, proto uint8) (K, bool)) (*Device[K], error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: /dev/net/tun: %w (the kernel needs CONFIG_TUN)", errDevice, err)
	}
	d := &Device[K]{fd: fd, of: of, buf: make([]byte, maxFrame+vnetHeader), queues: map[K]*queue{}}
	if d.Ifindex, err = setUp(fd, name, stays); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%w %s: %w", errDevice, name, err)
	}
	return d, nil
}

func setUp(fd int, name string, stays bool) (ifindex int, err error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return 0, fmt.Errorf("TUNSETIFF: %w (is another agent here?)", err)
	}
	if stays {
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
			return 0, fmt.Errorf("TUNSETPERSIST: %w", err)
		}
	}
	const offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return 0, fmt.Errorf("TUNSETOFFLOAD: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(s)
	ifr.SetUint32(queueLength)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFTXQLEN, ifr); err != nil {
		return 0, fmt.Errorf("its queue's length: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_NOARP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return 0, fmt.Errorf("setting it up: %w", err)
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		return 0, err
	}
	return i.Index, nil
}

// Close ends this process's hold of the device. What waits in it is lost, and with a device that does not stay the device.
func (d *Device[K]) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd >= 0 {
		unix.Close(d.fd)
	}
	d.fd = -1
}

// Expect has packets of a flow wait here once they are collected, until Flush, FlushAfter or Forget.
func (d *Device[K]) Expect(k K) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queues[k] == nil {
		d.queues[k] = &queue{}
	}
}

// Forget drops what waits of a flow.
func (d *Device[K]) Forget(k K) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forget(k)
}

// Flush puts the packets of a flow back, in the order in which they came, and then calls open, which has those that come go their
// way at once. It returns how many waited. A few may be on their way to the device then: Collect puts them back. What is put back must
// not come here again before open.
func (d *Device[K]) Flush(k K, open func() error) (waited int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.collect()
	q := d.forget(k) // what is collected from here on goes at once
	waited = len(q)
	for _, frame := range q {
		err = errors.Join(err, d.write(frame))
	}
	// Those that came meanwhile first, and then the way is open; a few may have slipped in between.
	err = errors.Join(err, d.collect())
	return waited, errors.Join(err, open(), d.collect())
}

// FlushAfter calls open first: for packets that may come here again until then. Those that come at once may overtake those that waited.
func (d *Device[K]) FlushAfter(k K, open func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := errors.Join(open(), d.collect())
	for _, frame := range d.forget(k) {
		err = errors.Join(err, d.write(frame))
	}
	return errors.Join(err, d.collect())
}

// Collect takes packets out of the device's own queue, which is short: see Ready. Those of flows that do not wait are put back at once.
func (d *Device[K]) Collect() error {
	for {
		d.mu.Lock()
		n, err := d.read()
		d.mu.Unlock()
		if err != nil || n < maxCollected {
			return err
		}
	}
}

// collect does so once.
func (d *Device[K]) collect() error {
	_, err := d.read()
	return err
}

// forget ends a queue, and returns what was in it.
func (d *Device[K]) forget(k K) [][]byte {
	q := d.queues[k]
	delete(d.queues, k)
	if q == nil {
		return nil
	}
	d.bytes -= q.bytes
	return q.frames
}

// Ready is a file whose SyscallConn waits for packets to collect: in the runtime's poller, not in a thread that keeps its P and has
// Go's monitor take it back. It is the caller's.
func (d *Device[K]) Ready() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDevice, err)
	}
	return os.NewFile(uintptr(fd), "hold"), nil
}

// read reads what the device has, and returns how many packets. Those of flows that do not wait any more go on at once.
func (d *Device[K]) read() (packets int, err error) {
	if d.fd < 0 {
		return 0, nil
	}
	for ; packets < maxCollected; packets++ {
		n, err := unix.Read(d.fd, d.buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return packets, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return packets, fmt.Errorf("%w: %w", errDevice, err)
		}
		frame := d.buf[:n]
		q := d.findQueue(frame)
		switch {
		case q == nil:
			if err := d.write(frame); err != nil {
				return packets, err
			}
		case d.bytes+n > maxBuffered || q.bytes+n > maxPerFlow:
			d.dropped++
		default:
			d.bytes, q.bytes = d.bytes+n, q.bytes+n
			q.frames = append(q.frames, append([]byte(nil), frame...))
		}
	}
	return packets, nil
}

func (d *Device[K]) write(frame []byte) error {
	if _, err := unix.Write(d.fd, frame); err != nil {
		return fmt.Errorf("%w: letting a packet go: %w", errDevice, err)
	}
	return nil
}

// findQueue finds the queue of a frame's flow; nil: it does not wait.
func (d *Device[K]) findQueue(frame []byte) *queue {
	from, to, proto, ok := parseEnds(frame[min(vnetHeader, len(frame)):])
	if !ok {
		return nil
	}
	k, ok := d.of(from, to, proto)
	if !ok {
		return nil
	}
	return d.queues[k]
}

// parseEnds are the source and the destination of an Ethernet frame of TCP or UDP, as the data path has parked it: without tags
// and extension headers.
func parseEnds(b []byte) (from, to netip.AddrPort, proto uint8, ok bool) {
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
