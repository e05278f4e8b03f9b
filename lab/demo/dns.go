// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/routers"
)

// Types of DNS queries.
const (
	typeA   = 1
	typeANY = 255
)

// query returns a DNS query for www.weir.test.
func query(id uint16, qtype uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, id)
	b = append(b, "\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03www\x04weir\x04test\x00"...)
	b = binary.BigEndian.AppendUint16(b, qtype)
	return append(b, 0, 1)
}

// signedQuery asks for the signature, too (EDNS, bit DO).
func signedQuery() []byte {
	b := query(1, typeA)
	b[11] = 1
	return append(b, 0, 0, 41, 0x10, 0, 0, 0, 0x80, 0, 0, 0)
}

// knot starts a DNS server for the zone weir.test. It signs every answer anew, if asked for a signature.
func (h *Host) knot() (*lab.Process, error) {
	dir := filepath.Join(h.stage.Dir, "knot-"+h.label)
	conf := fmt.Sprintf(`server:
    rundir: %[1]s
    listen: 0.0.0.0@53
    udp-workers: 1
    tcp-workers: 1
    background-workers: 1
database:
    storage: %[1]s
log:
  - target: %[1]s/log
    any: warning
zone:
  - domain: weir.test
    storage: %[1]s
    file: zone
    module: mod-onlinesign
`, dir)
	zone := "$ORIGIN weir.test.\n$TTL 60\n@ SOA ns hostmaster 1 3600 600 86400 60\n@ NS ns\nns A 192.0.2.1\nwww A 192.0.2.2\nwww TXT \"weir\"\n"
	file := filepath.Join(dir, "knot.conf")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(file, []byte(conf), 0o644), os.WriteFile(filepath.Join(dir, "zone"), []byte(zone), 0o644)); err != nil {
		return nil, err
	}
	return h.Daemon("knot", "knotd", "-c", file)
}

// resolvers are clients of a DNS server, each with its own address.
type resolvers struct {
	sent, got atomic.Int64
}

// start makes clients ask at a rate until the demonstration ends.
func (r *resolvers) start(ctx context.Context, s *Stage, dialer *routers.Dialer, clients []netip.Addr, to netip.AddrPort, every time.Duration, qtype uint16) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	s.OnClose(func() { cancel(); running.Wait() })
	for i, a := range clients {
		conn, err := dialer.Dial("udp", a, to)
		if err != nil {
			return err
		}
		running.Go(func() { r.receive(conn) })
		running.Go(func() {
			defer conn.Close()
			_ = pause(ctx, every*time.Duration(i)/time.Duration(len(clients)))
			for id := uint16(0); ctx.Err() == nil; id++ {
				if _, err := conn.Write(query(id, qtype)); err == nil {
					r.sent.Add(1)
				}
				_ = pause(ctx, every)
			}
		})
	}
	return nil
}

// receive counts answers until the socket is closed.
func (r *resolvers) receive(conn net.Conn) {
	b := make([]byte, 1500)
	for {
		n, err := conn.Read(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && n >= 12 && b[3]&0xf == 0 && b[7] > 0 {
			r.got.Add(1)
		}
	}
}

// share measures the answered share of the queries for a while.
func (r *resolvers) share(ctx context.Context, d time.Duration) (float64, error) {
	sent, got := r.sent.Load(), r.got.Load()
	if err := pause(ctx, d); err != nil {
		return 0, err
	}
	n := r.sent.Load() - sent
	if err := pause(ctx, 100*time.Millisecond); err != nil { // answers on their way
		return 0, err
	}
	if n == 0 {
		return 0, errors.New("the clients sent no query")
	}
	return min(1, float64(r.got.Load()-got)/float64(n)), nil
}

// flood sends DNS queries with drawn sources of a prefix at a rate, in a thread of its own.
type flood struct {
	sent atomic.Int64
	stop chan struct{}
	done chan error
}

// startFlood begins. Call end.
func startFlood(ns *netns.Handle, prefix netip.Prefix, to netip.AddrPort, rate int) *flood {
	f := &flood{stop: make(chan struct{}), done: make(chan error, 1)}
	go func() {
		f.done <- ns.Do(func() error { return f.send(prefix, to, rate) })
	}()
	return f
}

func (f *flood) end() error {
	close(f.stop)
	return <-f.done
}

func (f *flood) send(prefix netip.Prefix, to netip.AddrPort, rate int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	packet := datagram(to, signedQuery())
	address := &unix.SockaddrInet4{Addr: to.Addr().As4()}
	base := binary.BigEndian.Uint32(prefix.Addr().AsSlice())
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-f.stop:
			return nil
		case <-tick.C:
		}
		for range rate / 1000 {
			r := rand.Uint64()
			binary.BigEndian.PutUint32(packet[12:], base|uint32(r)&(1<<(32-prefix.Bits())-1))
			binary.BigEndian.PutUint16(packet[20:], 1024+uint16(r>>32)%60000)
			if unix.Sendto(fd, packet, 0, address) == nil {
				f.sent.Add(1)
			}
		}
	}
}

// datagram returns an IPv4 packet. The kernel adds its length and checksum; the checksum of UDP is optional.
func datagram(to netip.AddrPort, payload []byte) []byte {
	b := make([]byte, 28, 28+len(payload))
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	copy(b[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[22:], to.Port())
	binary.BigEndian.PutUint16(b[24:], uint16(8+len(payload)))
	return append(b, payload...)
}
