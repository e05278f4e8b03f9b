// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/internal/ipfix"
	"golang.org/x/sys/unix"
)

// sinkArg runs the lab's own binary as a collector; see Sink.
const sinkArg = "__sink"

var be = binary.BigEndian

// Family selects the IP versions of a sink. DualStack uses one socket of each protocol for both.
type Family string

// The families of sockets.
const (
	IPv4      Family = "4"
	IPv6      Family = "6"
	DualStack Family = "46"
)

// network returns Go's name for a protocol over the family. The IPv6 family sets IPV6_V6ONLY.
func (f Family) network(proto string) string {
	if f == DualStack {
		return proto
	}
	return proto + string(f)
}

// any returns the wildcard address of the family.
func (f Family) any() string {
	if f == IPv4 {
		return "0.0.0.0"
	}
	return "[::]"
}

// Sink handles "weir-lab __sink PORT FAMILY FLOWS BMP": it turns the process into a collector with a short
// start time, as a substitute for nfacctd. The collector has one UDP socket and one TCP listener on the
// port, with SO_REUSEPORT, and writes nfacctd's lines to the two files. main calls Sink first. It returns
// if the process is no such child.
func Sink() {
	if len(os.Args) != 6 || os.Args[1] != sinkArg {
		return
	}
	fmt.Fprintln(os.Stderr, "ERROR:", sinkMain(os.Args[2], Family(os.Args[3]), os.Args[4], os.Args[5]))
	os.Exit(1)
}

func sinkMain(port string, family Family, flows, bmp string) error {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	s := &sink{flowsSeen: map[flowLine]int{}, templates: map[templateKey][]ipfix.Field{}}
	if s.flows, err = appendTo(flows); err != nil {
		return err
	}
	if s.bmp, err = appendTo(bmp); err != nil {
		return err
	}
	return s.listen(family, uint16(n))
}

func appendTo(path string) (*json.Encoder, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	return json.NewEncoder(f), err
}

// sink is a collector. It decodes only the fields counted by the lab.
type sink struct {
	mu         sync.Mutex
	flows, bmp *json.Encoder
	flowsSeen  map[flowLine]int // packets since the last write; Packets of the key is 0
	templates  map[templateKey][]ipfix.Field
}

// purgeEvery is the interval of writes of counted flows.
const purgeEvery = 100 * time.Millisecond

// open opens the sockets of a sink; port 0 takes any free port, a different one for each socket.
func open(family Family, port uint16) (net.PacketConn, net.Listener, error) {
	addr := fmt.Sprintf("%s:%d", family.any(), port)
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		}), err)
	}}
	lc.SetMultipathTCP(false) // socket maps reject MPTCP sockets
	udp, err := lc.ListenPacket(context.Background(), family.network("udp"), addr)
	if err != nil {
		return nil, nil, err
	}
	tcp, err := lc.Listen(context.Background(), family.network("tcp"), addr)
	if err != nil {
		udp.Close()
		return nil, nil, err
	}
	return udp, tcp, nil
}

// listen serves until an error.
func (s *sink) listen(family Family, port uint16) error {
	udp, tcp, err := open(family, port)
	if err != nil {
		return err
	}
	fail := make(chan error)
	go func() { fail <- s.readUDP(udp) }()
	go func() { fail <- s.accept(tcp) }()
	go func() {
		for range time.Tick(purgeEvery) {
			s.purge()
		}
	}()
	return <-fail
}

// purge writes the flows counted since the last call, like the print plugin.
func (s *sink) purge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, n := range s.flowsSeen {
		k.Packets = n
		_ = s.flows.Encode(k) // a full disk shows as missing records
	}
	clear(s.flowsSeen)
}

func (s *sink) readUDP(c net.PacketConn) error {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		a := from.(*net.UDPAddr).AddrPort().Addr().Unmap()
		if err := s.message(a, buf[:n]); err != nil {
			fmt.Fprintf(os.Stderr, "WARN: IPFIX of %s: %v\n", a, err)
		}
	}
}

func (s *sink) accept(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			a := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
			s.log(bmpLine{Event: "log_init", Router: a.String()})
			if err := s.session(a, c); !ended(err) {
				fmt.Fprintf(os.Stderr, "WARN: BMP of %s: %v\n", a, err)
			}
			s.log(bmpLine{Event: "log_close", Router: a.String()})
		}()
	}
}

// ended reports whether an error is the end of a session. The router ends it, or an external reset such as
// weir's after a move (SOCK_DESTROY).
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNABORTED)
}

func (s *sink) log(l bmpLine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.bmp.Encode(l) // as in purge
}

// session reads one BMP session (RFC 7854 section 4.1).
func (s *sink) session(a netip.Addr, r io.Reader) error {
	var head [6]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		size := be.Uint32(head[1:])
		if head[0] != 3 || size < 6 || size > 1<<16 {
			return fmt.Errorf("version %d, length %d", head[0], size)
		}
		body := make([]byte, size-6)
		if _, err := io.ReadFull(r, body); err != nil {
			return err
		}
		s.log(decodeBMP(a, head[5], body))
	}
}

// decodeBMP extracts the MED of a route and the remote port of a Peer Up. Both follow the per-peer header
// of 42 bytes.
func decodeBMP(a netip.Addr, kind byte, body []byte) bmpLine {
	l := bmpLine{Event: "log", Router: a.String(), Message: fmt.Sprintf("type_%d", kind)}
	switch {
	case kind == 3 && len(body) >= 42+20:
		l.Message, l.RemotePort = "peer_up", int(be.Uint16(body[42+18:]))
	case kind == 0 && len(body) >= 42+23:
		l.Message, l.Log = "route_monitor", "update"
		update := body[42+19:]
		withdrawn := int(be.Uint16(update))
		if withdrawn+4 <= len(update) {
			l.MED = med(update[withdrawn+4:])
		}
	}
	return l
}

// med finds MULTI_EXIT_DISC among path attributes (RFC 4271 section 4.3).
func med(attrs []byte) uint32 {
	for len(attrs) >= 4 {
		head, size := 3, int(attrs[2])
		if attrs[0]&0x10 != 0 { // extended length
			head, size = 4, int(be.Uint16(attrs[2:]))
		}
		if head+size > len(attrs) {
			break
		}
		if attrs[1] == 4 && size == 4 {
			return be.Uint32(attrs[head:])
		}
		attrs = attrs[head+size:]
	}
	return 0
}
