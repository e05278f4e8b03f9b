// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

type rawConn = syscall.RawConn

// PacketConn is a UDP socket that outlives this process, with its queued datagrams. A datagram
// already read is not in the socket. As with any UDP server, a crash loses the datagram being
// processed.
type PacketConn struct {
	*net.UDPConn
	m     *Member
	label string
	id    uint64

	once    sync.Once
	stopped chan struct{}

	mu     sync.Mutex
	paused bool
	readBy time.Time     // as set by the application
	wake   chan struct{} // closed when paused or readBy changes
}

// ListenPacket binds a UDP address. If the predecessor of this name had a socket of the same
// network and address, ListenPacket continues with it.
func (m *Member) ListenPacket(ctx context.Context, network, address string) (*PacketConn, error) {
	if !strings.HasPrefix(network, "udp") {
		return nil, fmt.Errorf("listen %s: want udp, udp4 or udp6", network)
	}
	label := m.label(network, address)
	p, err := m.listenPacket(ctx, network, address, label)
	if err != nil {
		m.unlabel(label)
	}
	return p, err
}

func (m *Member) listenPacket(ctx context.Context, network, address, label string) (*PacketConn, error) {
	f, err := m.find(wire.Packet, label)
	if err != nil {
		return nil, err
	}
	var n net.PacketConn
	if f != nil {
		n, err = net.FilePacketConn(f)
		f.Close()
	} else {
		n, err = m.o.Listen.ListenPacket(ctx, network, address)
	}
	if err != nil {
		return nil, err
	}
	u, ok := n.(*net.UDPConn)
	if !ok {
		n.Close()
		return nil, fmt.Errorf("listen %s: the keeper's socket of this name is not a UDP socket", label)
	}
	p := &PacketConn{UDPConn: u, m: m, label: label, stopped: make(chan struct{}), wake: make(chan struct{})}
	if p.id, err = socketCookie(u); err == nil && f == nil {
		err = p.keep()
	}
	if err != nil {
		u.Close()
		return nil, err
	}
	m.mu.Lock()
	m.packets = append(m.packets, p)
	if m.proving != nil {
		p.pause(true)
	}
	m.mu.Unlock()
	return p, nil
}

func (p *PacketConn) keep() error {
	raw, err := p.UDPConn.SyscallConn()
	if err != nil {
		return err
	}
	return p.m.keepSocket(wire.Packet, p.id, p.label, raw)
}

// stop closes the socket. The keeper and a replacement still have it.
func (p *PacketConn) stop() {
	p.once.Do(func() { close(p.stopped); p.UDPConn.Close() })
}

// pause suspends or resumes readers while a newer process reads from the socket.
func (p *PacketConn) pause(yes bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = yes
	if yes {
		p.UDPConn.SetReadDeadline(past)
	} else {
		p.UDPConn.SetReadDeadline(p.readBy)
	}
	p.changed()
}

// changed wakes waiting readers. p.mu is held.
func (p *PacketConn) changed() {
	close(p.wake)
	p.wake = make(chan struct{})
}

// SetReadDeadline implements net.Conn.
func (p *PacketConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readBy = t
	p.changed()
	if p.paused {
		return nil // set on resume
	}
	return p.UDPConn.SetReadDeadline(t)
}

// SetDeadline implements net.Conn.
func (p *PacketConn) SetDeadline(t time.Time) error {
	return errors.Join(p.SetReadDeadline(t), p.SetWriteDeadline(t))
}

// again waits while the socket is paused, after a failed read. It reports whether to read again.
func (p *PacketConn) again(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	for {
		p.mu.Lock()
		paused, by, wake := p.paused, p.readBy, p.wake
		p.mu.Unlock()
		left := time.Until(by)
		switch {
		case !by.IsZero() && left <= 0:
			return false
		case !paused:
			return true
		case by.IsZero():
			left = time.Hour
		}
		select {
		case <-wake:
		case <-p.stopped:
			return true // the next read returns the reason
		case <-time.After(left):
		}
	}
}

// SyscallConn returns the socket itself. Its Read also waits during a pause.
func (p *PacketConn) SyscallConn() (syscall.RawConn, error) {
	raw, err := p.UDPConn.SyscallConn()
	return packetRaw{raw, p}, err
}

type packetRaw struct {
	syscall.RawConn
	p *PacketConn
}

// Read implements syscall.RawConn.
func (r packetRaw) Read(f func(fd uintptr) bool) error {
	for {
		if err := r.RawConn.Read(f); !r.p.again(err) {
			return err
		}
	}
}

// replaced translates a read error: ErrReplaced after a newer process has taken over.
func (p *PacketConn) replaced(err error) error {
	if errors.Is(err, net.ErrClosed) {
		select {
		case <-p.stopped:
			p.m.handedOver()
			return ErrReplaced
		default:
		}
	}
	return err
}

// Read implements net.Conn. All reads return ErrReplaced after a newer process has taken over.
func (p *PacketConn) Read(b []byte) (int, error) {
	for {
		n, err := p.UDPConn.Read(b)
		if !p.again(err) {
			return n, p.replaced(err)
		}
	}
}

// ReadFrom implements net.PacketConn.
func (p *PacketConn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		n, a, err := p.UDPConn.ReadFrom(b)
		if !p.again(err) {
			return n, a, p.replaced(err)
		}
	}
}

// ReadFromUDP is like the method of net.UDPConn.
func (p *PacketConn) ReadFromUDP(b []byte) (int, *net.UDPAddr, error) {
	for {
		n, a, err := p.UDPConn.ReadFromUDP(b)
		if !p.again(err) {
			return n, a, p.replaced(err)
		}
	}
}

// ReadFromUDPAddrPort is like the method of net.UDPConn.
func (p *PacketConn) ReadFromUDPAddrPort(b []byte) (int, netip.AddrPort, error) {
	for {
		n, a, err := p.UDPConn.ReadFromUDPAddrPort(b)
		if !p.again(err) {
			return n, a, p.replaced(err)
		}
	}
}

// ReadMsgUDP is like the method of net.UDPConn.
func (p *PacketConn) ReadMsgUDP(b, oob []byte) (n, oobn, flags int, a *net.UDPAddr, err error) {
	for {
		n, oobn, flags, a, err = p.UDPConn.ReadMsgUDP(b, oob)
		if !p.again(err) {
			return n, oobn, flags, a, p.replaced(err)
		}
	}
}

// ReadMsgUDPAddrPort is like the method of net.UDPConn.
func (p *PacketConn) ReadMsgUDPAddrPort(b, oob []byte) (n, oobn, flags int, a netip.AddrPort, err error) {
	for {
		n, oobn, flags, a, err = p.UDPConn.ReadMsgUDPAddrPort(b, oob)
		if !p.again(err) {
			return n, oobn, flags, a, p.replaced(err)
		}
	}
}

// Close closes the socket for good.
func (p *PacketConn) Close() error {
	err := p.UDPConn.Close()
	p.m.mu.Lock()
	for i, o := range p.m.packets {
		if o == p {
			p.m.packets = append(p.m.packets[:i:i], p.m.packets[i+1:]...)
			defer p.m.unlabel(p.label) // after the keeper has released it
			break
		}
	}
	p.m.mu.Unlock()
	return errors.Join(err, p.m.post(&wire.Message{Type: wire.Drop, Session: p.id}))
}
