// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// helloTime bounds the connection's setup, from the first byte of TLS on.
const helloTime = 5 * time.Second

// keepAlive detects a dead machine within a few seconds.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

// goneTime is the same with unacknowledged data. The kernel then sends no keepalives, and repeats
// the data for up to a quarter of an hour.
const goneTime = 5 * time.Second

func limitGone(t *net.TCPConn) error {
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(goneTime.Milliseconds()))
	})
	return errors.Join(cerr, err)
}

// NewInstance returns a random instance number. It differs for each run of an agent.
func NewInstance() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint64(b[:]) | 1
}

// Conn is a connection to another agent. Send is safe for concurrent use. Only one goroutine may
// call Receive.
type Conn struct {
	Peer Hello // the other agent

	tls         *tls.Conn
	in          *bufio.Reader
	mu          sync.Mutex // never held together with Identity.mu
	buf         []byte
	control     Control
	incarnation incarnation
	sessions    atomic.Bool // see TakeSessions
	out         outbox
	registers   pace // used by Receive alone
}

// Dial connects to an agent. name is the name in its certificate.
func Dial(ctx context.Context, address, name string, as *Identity, own Hello) (*Conn, error) {
	return DialAny(ctx, address, []string{name}, as, own)
}

// DialAny connects to an agent with one of several names. Its certificate tells the name. One
// handshake is enough for all names. An agent logs each aborted handshake.
func DialAny(ctx context.Context, address string, names []string, as *Identity, own Hello) (*Conn, error) {
	config := as.Config().Clone()
	config.ServerName = names[0]
	if len(names) > 1 {
		verifyAny(config, names)
	}
	d := net.Dialer{Timeout: helloTime, KeepAliveConfig: keepAlive}
	raw, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	e, err := newEager(raw.(*net.TCPConn))
	if err != nil {
		raw.Close()
		return nil, err
	}
	c, err := introduce(ctx, tls.Client(e, config), own)
	if err == nil && !slices.Contains(names, c.Peer.Name) {
		c.Close()
		err = fmt.Errorf("its name is %q, not %q: use exactly this name", c.Peer.Name, strings.Join(names, `" or "`))
	}
	if err != nil {
		return nil, fmt.Errorf("agent at %s: %w", address, err)
	}
	if b := own.Beside; b != nil {
		c.control.Peers = b.Peers
		if err := c.Register(b.Register); err != nil {
			c.Close()
			return nil, fmt.Errorf("registering at %s: %w", address, err)
		}
	}
	return c, nil
}

// Accept completes the setup of an incoming connection.
func Accept(ctx context.Context, raw net.Conn, as *Identity, own Hello) (*Conn, error) {
	if t, ok := raw.(*net.TCPConn); ok {
		if err := t.SetKeepAliveConfig(keepAlive); err != nil {
			return nil, err
		}
		e, err := newEager(t)
		if err != nil {
			return nil, err
		}
		raw = e
	}
	c, err := introduce(ctx, tls.Server(raw, as.Config()), own)
	if err != nil {
		return nil, fmt.Errorf("agent from %s: %w", raw.RemoteAddr(), err)
	}
	return c, nil
}

func introduce(ctx context.Context, t *tls.Conn, own Hello) (_ *Conn, err error) {
	c := &Conn{tls: t, out: outbox{wake: make(chan struct{}, 1)}}
	if raw := c.tcp(); raw != nil {
		if err := limitGone(raw); err != nil {
			raw.Close()
			return nil, err
		}
	}
	stop := context.AfterFunc(ctx, func() { t.NetConn().Close() })
	defer func() {
		if !stop() && !errors.Is(err, ctx.Err()) {
			err = errors.Join(ctx.Err(), err)
		}
		if err != nil {
			t.NetConn().Close()
		}
	}()
	if err := t.SetDeadline(time.Now().Add(helloTime)); err != nil {
		return nil, err
	}
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	c.in = bufio.NewReaderSize(t, 64<<10) // only agents with a certificate get this far
	hello, err := own.append(nil)
	if err != nil {
		return nil, err
	}
	if err := c.write(typeHello, hello, nil); err != nil {
		return nil, err
	}
	_, body, err := c.read(helloLimit)
	if err != nil {
		return nil, err
	}
	if c.Peer, err = parseHello(body); err != nil {
		return nil, err
	}
	// The certificate proves the name. Otherwise every agent could act for every backend.
	if err := isFor(t.ConnectionState().PeerCertificates[0], c.Peer.Name); err != nil {
		return nil, fmt.Errorf("it calls itself %q: %w", c.Peer.Name, err)
	}
	c.incarnation.note()
	return c, t.SetDeadline(time.Time{})
}

// soonTime bounds the write of each part of a frame. A peer that does not read must not block its
// sender, but a slow path gets this time for each part. A connection over the limit is closed.
const soonTime = time.Second

// partSize is the largest write, in bytes.
const partSize = 256 << 10

// Send sends a frame. After an error the connection is closed, except for a frame over the size
// limit.
func (c *Conn) Send(f Frame) error {
	return c.write(typeMove, f.appendHeader(nil), f.Session)
}

func (c *Conn) write(kind byte, header, body []byte) error {
	if len(header)+len(body)+1 > maxFrame {
		return fmt.Errorf("a frame of %d bytes: at most %d", len(header)+len(body), maxFrame)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buf = binary.BigEndian.AppendUint32(c.buf[:0], uint32(1+len(header)+len(body)))
	c.buf = append(append(append(c.buf, kind), header...), body...)
	var err error
	for b := c.buf; err == nil && len(b) > 0; {
		part := b[:min(len(b), partSize)]
		c.giveUp(time.Now().Add(soonTime))
		_, err = c.tls.Write(part)
		b = b[len(part):]
	}
	if cap(c.buf) > 1<<20 {
		c.buf = nil
	}
	if err != nil {
		c.Close() // perhaps within a frame; a pending Receive fails too
		return err
	}
	c.giveUp(time.Time{}) // later writes of TLS itself have no limit
	return nil
}

// SendLoad reports the load of a service here, in the service's unit. none: the service has no
// member here.
func (c *Conn) SendLoad(service uint16, n uint32, none bool) error {
	flags := uint16(0)
	if none {
		flags = flagNone
	}
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, service), flags)
	return c.write(typeLoad, binary.BigEndian.AppendUint32(b, n), nil)
}

const flagNone = 1 // of a load frame

// Receive waits for the next frame about a session or a load. It processes other frames itself, see
// [Control]. io.EOF means that the other side has closed the connection.
func (c *Conn) Receive() (Frame, error) {
	for {
		kind, body, err := c.read(c.limit)
		if err != nil {
			return Frame{}, err
		}
		c.incarnation.note()
		if kind == typeMove {
			return parseFrame(body)
		}
		if kind == typeLoad && len(body) == 8 {
			return Frame{IsLoad: true, Load: binary.BigEndian.Uint32(body[4:]), None: binary.BigEndian.Uint16(body[2:])&flagNone != 0, Flow: Flow{Service: binary.BigEndian.Uint16(body)}}, nil
		}
		if err := c.aside(kind, body); err != nil {
			return Frame{}, err
		}
	}
}

// More reports whether there is received data not yet returned by Receive.
func (c *Conn) More() bool {
	if c.in.Buffered() > 0 {
		return true
	}
	t := c.tcp()
	if t == nil {
		return false
	}
	raw, err := t.SyscallConn()
	waiting := 0
	if err == nil {
		_ = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	}
	return waiting > 0
}

// read reads a frame. limit returns the longest body of a type. It is called before the body is
// read.
func (c *Conn) read(limit func(kind byte) (int, error)) (kind byte, body []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(c.in, head[:4]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n == 0 {
		return 0, nil, fmt.Errorf("%w: a frame without a type", ErrFormat)
	}
	if _, err := io.ReadFull(c.in, head[4:]); err != nil {
		return 0, nil, unexpected(err)
	}
	most, err := limit(head[4])
	if err != nil {
		return 0, nil, err
	}
	if int64(n)-1 > int64(most) {
		return 0, nil, fmt.Errorf("%w: type %d of %d bytes: at most %d are allowed here", ErrFormat, head[4], n-1, most)
	}
	// Allocate with the received data: the length is only a claim.
	for want := int(n - 1); want > 0; {
		part := min(want, 1<<20)
		at := len(body)
		body = append(body, make([]byte, part)...)
		if _, err := io.ReadFull(c.in, body[at:]); err != nil {
			return 0, nil, unexpected(err)
		}
		c.incarnation.note() // an answer to a ping would follow all of it
		want -= part
	}
	return head[4], body, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Remote returns the other side's address without port. It is invalid unless the connection uses
// TCP.
func (c *Conn) Remote() netip.Addr {
	at, _ := c.tls.NetConn().RemoteAddr().(*net.TCPAddr)
	if at == nil {
		return netip.Addr{}
	}
	return at.AddrPort().Addr().Unmap()
}

// Close closes the connection at once.
func (c *Conn) Close() error { return c.tls.NetConn().Close() }
