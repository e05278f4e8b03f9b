// SPDX-License-Identifier: Apache-2.0

// Package packetbuf is a network device for buffering packets of moving sessions, at a load
// balancer or at the backend losing a session. The data path redirects packets to the device. The
// agent reads them as Ethernet frames and writes them back.
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
var errDevice = errors.New("buffer device")

// These limits bound the buffered packets. Further ones are dropped, and the client repeats them.
const (
	maxPerFlow  = 8 << 20 // bytes
	maxBuffered = 256 << 20
)

// maxCollected is the number of packets read from the device's queue at a time. The queue holds no
// more. Later packets may be packets just written back.
const maxCollected = queueLength

const queueLength = 8192 // packets

const (
	vnetHeader = 10         // bytes: struct virtio_net_hdr
	maxFrame   = 1<<16 + 64 // a merged segment, and headers
)

// Device is a TAP device. Its packets wait by flow, in order of arrival. With a virtio header
// (IFF_VNET_HDR), segments merged by the kernel stay merged, and checksums stay partial.
type Device[K comparable] struct {
	Ifindex int

	fd      int
	of      func(from, to netip.AddrPort, proto uint8) (K, bool)
	mu      sync.Mutex
	buf     []byte
	queues  map[K]*queue
	bytes   int
	dropped uint64 // packets over the limits
}

// queue has the packets of a flow.
type queue struct {
	frames [][]byte
	bytes  int
}

// predecessor is how long an agent waits for the device of a killed predecessor.
const predecessor = 3 * time.Second

// Again calls open, which must create a device, and repeats it for up to 3 s while a predecessor
// still has the device (EBUSY).
func Again[K comparable](open func() (*Device[K], error)) (d *Device[K], err error) {
	for end := time.Now().Add(predecessor); ; time.Sleep(predecessor / 60) {
		d, err = open()
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return d, err
		}
	}
}

// New creates the device in the network namespace of the calling thread, or opens the existing one.
// With stays the device outlives this process. of returns the flow of a TCP or UDP packet by
// source, destination and protocol. It may be called at any time.
func New[K comparable](name string, stays bool, of func(from, to netip.AddrPort, proto uint8) (K, bool)) (*Device[K], error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		remedy := "the kernel needs CONFIG_TUN"
		if errors.Is(err, os.ErrPermission) {
			remedy = "chmod 666 it, as udev does"
		}
		return nil, fmt.Errorf("%w: /dev/net/tun: %w (%s)", errDevice, err, remedy)
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
		return 0, fmt.Errorf("TUNSETIFF: %w (is another agent running?)", err)
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
		return 0, fmt.Errorf("set its queue length: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_NOARP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return 0, fmt.Errorf("set it up: %w", err)
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		return 0, err
	}
	return i.Index, nil
}

// Close closes the device. Its buffered packets are lost. A device without stays is deleted.
func (d *Device[K]) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd >= 0 {
		unix.Close(d.fd)
	}
	d.fd = -1
}

// Expect buffers collected packets of a flow until Flush, FlushAfter or Forget.
func (d *Device[K]) Expect(k K) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queues[k] == nil {
		d.queues[k] = &queue{}
	}
}

// Forget drops the buffered packets of a flow.
func (d *Device[K]) Forget(k K) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forget(k)
}

// Flush writes the packets of a flow back, in order of arrival, and then calls open. open must let
// new packets pass the device. Until then the packets written back must not be redirected here
// again. Flush returns their number. A few packets may still be on their way to the device after
// open. Collect writes them back.
func (d *Device[K]) Flush(k K, open func() error) (waited int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.collect()
	q := d.forget(k) // packets collected from here on are written back at once
	waited = len(q)
	for _, frame := range q {
		err = errors.Join(err, d.write(frame))
	}
	// First the packets received meanwhile, then open. A few may have arrived in between.
	err = errors.Join(err, d.collect())
	return waited, errors.Join(err, open(), d.collect())
}

// FlushAfter is Flush with open called first, for packets that would be redirected here again
// before open. New packets may then overtake buffered ones.
func (d *Device[K]) FlushAfter(k K, open func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := errors.Join(open(), d.collect())
	for _, frame := range d.forget(k) {
		err = errors.Join(err, d.write(frame))
	}
	return errors.Join(err, d.collect())
}

// Collect reads packets from the device's short queue: see Ready. It writes back packets of flows
// without a buffer at once.
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

// collect is Collect for at most one full queue. The caller holds mu.
func (d *Device[K]) collect() error {
	_, err := d.read()
	return err
}

// forget ends a queue and returns its packets. The caller holds mu.
func (d *Device[K]) forget(k K) [][]byte {
	q := d.queues[k]
	delete(d.queues, k)
	if q == nil {
		return nil
	}
	d.bytes -= q.bytes
	return q.frames
}

// Ready returns a file whose SyscallConn waits for packets to collect. The wait uses the runtime's
// poller. A blocking read would keep its P until Go's monitor takes it away. The caller closes the
// file.
func (d *Device[K]) Ready() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDevice, err)
	}
	return os.NewFile(uintptr(fd), "hold"), nil
}

// read reads the packets of the device and returns their number. It writes back packets of flows
// without a buffer. The caller holds mu.
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
		return fmt.Errorf("%w: write a packet back: %w", errDevice, err)
	}
	return nil
}

// findQueue returns the queue of a frame's flow, nil for none. The caller holds mu.
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

// parseEnds returns the source and the destination of an Ethernet frame with TCP or UDP. The data
// path redirects only frames without VLAN tags and extension headers.
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
