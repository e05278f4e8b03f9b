// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Sizes of the capture. The buffer holds some thousand template messages, in case all exporters send at once. Lost
// messages are repeated.
const (
	captureBuffer = 4 << 20 // bytes
	captureBurst  = 512     // messages between two checks of the rate
	captureRate   = 20000   // messages per second in a burst; the filter has lower limits for sustained rates
)

// HeardMessage is a datagram with templates.
type HeardMessage struct {
	Session bpf.TemplatesSession // without version and domain
	Ifindex uint32
	Payload []byte
}

// templateCapture receives a namespace's incoming packets with two packet sockets. A filter passes only messages with
// templates. The sockets get copies and do not affect the packets.
type templateCapture struct {
	c       *kernel.Collection
	sockets []*os.File
	ports   map[uint16]uint64 // refused messages already reported
}

// openTemplateCapture starts the capture at ports. give receives every message, from two goroutines.
func openTemplateCapture(ns *netns.Handle, sessions *ebpf.Map, ports map[uint16]bool, give func(HeardMessage)) (*templateCapture, error) {
	spec, err := bpf.LoadTemplates()
	if err != nil {
		return nil, err
	}
	c := &templateCapture{ports: map[uint16]uint64{}}
	c.c, err = kernel.Load(spec, []string{bpf.TemplatesProgTemplatesFilter}, map[string]*ebpf.Map{bpf.TemplatesMapTemplatesSessions: sessions})
	if err != nil {
		return nil, err
	}
	err = c.watch(ports)
	if err == nil {
		err = ns.Do(c.openAll)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	for _, s := range c.sockets {
		go readMessages(s, give)
	}
	return c, nil
}

func (c *templateCapture) openAll() error {
	// One socket per protocol: a socket for all protocols would also receive outgoing packets.
	for _, proto := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
		if err := c.open(proto); err != nil {
			return fmt.Errorf("listen for templates: %w", err)
		}
	}
	return nil
}

func (c *templateCapture) open(proto uint16) error {
	// Without a protocol the socket receives nothing until its filter is attached.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open packet socket: %w", users.Lacking(err, unix.CAP_NET_RAW))
	}
	c.sockets = append(c.sockets, os.NewFile(uintptr(fd), "packet socket"))
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, c.c.Programs[bpf.TemplatesProgTemplatesFilter].FD()); err != nil {
		return err
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer/2) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, captureBuffer/2)
	}
	return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: spec.NetworkOrder(proto)})
}

// watch sets the ports of the filter.
func (c *templateCapture) watch(ports map[uint16]bool) error {
	m := c.c.Maps[bpf.TemplatesMapTemplatesPorts]
	for p := range ports {
		if _, ok := c.ports[p]; !ok {
			if err := m.Put(p, bpf.TemplatesPort{}); err != nil {
				return fmt.Errorf("watch port %d for templates: %w", p, err)
			}
			c.ports[p] = 0
		}
	}
	for _, p := range slices.Collect(maps.Keys(c.ports)) {
		if !ports[p] {
			m.Delete(p)
			delete(c.ports, p)
		}
	}
	return nil
}

// refused returns the number of messages refused by the filter at each port since the last call.
func (c *templateCapture) refused() map[uint16]uint64 {
	var out map[uint16]uint64
	for p, told := range c.ports {
		var v bpf.TemplatesPort
		if err := c.c.Maps[bpf.TemplatesMapTemplatesPorts].Lookup(p, &v); err != nil || v.Refused == told {
			continue
		}
		if out == nil {
			out = map[uint16]uint64{}
		}
		out[p] = v.Refused - told
		c.ports[p] = v.Refused
	}
	return out
}

// Close stops the capture and its goroutines.
func (c *templateCapture) Close() {
	for _, s := range c.sockets {
		s.Close()
	}
	if c.c != nil {
		c.c.Close()
	}
}

// readMessages reads until the socket is closed.
func readMessages(s *os.File, give func(HeardMessage)) {
	conn, err := s.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 1<<16)
	for n, since := 0, time.Now(); ; n++ {
		if n == captureBurst {
			time.Sleep(captureBurst*time.Second/captureRate - time.Since(since))
			n, since = 0, time.Now()
		}
		var size int
		var from unix.Sockaddr
		var rerr error
		err := conn.Read(func(fd uintptr) bool {
			size, from, rerr = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(rerr, unix.EAGAIN)
		})
		if err != nil {
			return // closed
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if rerr != nil || !ok {
			continue // an interface went down: the socket continues
		}
		if m, ok := readDatagram(buf[:size]); ok {
			m.Ifindex = uint32(ll.Ifindex)
			give(m)
		}
	}
}

// readDatagram parses the headers of a packet passed by the filter. The payload shares b.
func readDatagram(b []byte) (m HeardMessage, ok bool) {
	if len(b) < 20 {
		return m, false
	}
	var src, dst netip.Addr
	var udp int
	switch b[0] >> 4 {
	case 4:
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		udp = int(b[0]&15) * 4
	case 6:
		if len(b) < 40 {
			return m, false
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		udp = 40
	default:
		return m, false
	}
	if len(b) < udp+8 {
		return m, false
	}
	size := int(binary.BigEndian.Uint16(b[udp+4:]))
	if size < 8 || udp+size > len(b) {
		return m, false
	}
	m.Session = bpf.TemplatesSession{Src: src.As16(), Dst: dst.As16(), Sport: binary.BigEndian.Uint16(b[udp:]), Dport: binary.BigEndian.Uint16(b[udp+2:])}
	m.Payload = b[udp+8 : udp+size]
	return m, true
}
