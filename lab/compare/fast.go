// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/routers"
)

// messageSize is the size of every message to fast sinks in bytes: a few flow records, or a route.
const messageSize = 400

// window limits the messages in transit, to lose none in a full queue. A lost message costs less than a
// read one, and would make a slow way look cheap. The ring of a veth device holds 256.
const window = 192

// idleLimit is the longest transit time of messages. Later they count as lost.
const idleLimit = 30 * time.Second

// fastSite is a site with fast sinks as receivers.
type fastSite struct {
	*site
	path    string         // the selection of its sinks; several sites share one
	steered bool           // by weir
	options string         // of steer, in weir.yaml
	to      netip.AddrPort // destination of the routers
	sinks   []*counters
	pids    []int
	udp     []net.Conn
	tcp     []net.Conn
	message []byte
}

// newFastSite creates a site with two sinks at the addresses.
func newFastSite(w *world, name string, at func(*site) []netip.AddrPort) (*fastSite, error) {
	s, err := w.site(name)
	if err != nil {
		return nil, err
	}
	f := &fastSite{site: s, to: s.service(), message: ipfix(messageSize)}
	for i, addr := range at(s) {
		file := filepath.Join(w.env.Dir, fmt.Sprintf("%s-sink-%d", name, i))
		c, err := openCounters(file)
		if err != nil {
			return nil, err
		}
		log, err := os.Create(file + ".log")
		if err != nil {
			return nil, err
		}
		p, err := s.start(w.env, lab.Command{Path: w.env.Self(), Args: []string{sinkArg, addr.String(), file}, Output: log})
		log.Close()
		if err != nil {
			return nil, err
		}
		f.sinks, f.pids = append(f.sinks, c), append(f.pids, p.PID)
	}
	return f, nil
}

// ready waits until the sinks have their sockets.
func (f *fastSite) ready(ctx context.Context) error {
	return f.await(ctx, "sinks ready", func(c *counters) int64 { return c.ready.Load() }, int64(len(f.sinks)))
}

// connect opens a UDP socket from each device, and with tcp a TCP connection.
func (f *fastSite) connect(ctx context.Context, d *routers.Dialer, devices []netip.Addr, tcp bool) error {
	// A first connection resolves the neighbours. Before, most datagrams of a burst are dropped.
	came := f.sum(accepted)
	probe, err := d.Dial("tcp", devices[0], f.to)
	if err != nil {
		return err
	}
	defer probe.Close()
	if err := f.await(ctx, "connections", accepted, came+1); err != nil {
		return err
	}
	for _, from := range devices {
		c, err := d.Dial("udp", from, f.to)
		if err == nil {
			err = reportDrops(c)
		}
		if err != nil {
			return err
		}
		f.udp = append(f.udp, c)
	}
	if !tcp {
		return nil
	}
	for _, from := range devices {
		c, err := d.Dial("tcp", from, f.to)
		if err != nil {
			return err
		}
		f.tcp = append(f.tcp, c)
	}
	return nil
}

func (f *fastSite) close() {
	for _, c := range append(f.udp, f.tcp...) {
		c.Close()
	}
}

// await waits until a counter, summed over the sinks, reaches a number.
func (f *fastSite) await(ctx context.Context, what string, of func(*counters) int64, want int64) error {
	for begin := time.Now(); ; time.Sleep(50 * time.Microsecond) {
		var have int64
		for _, c := range f.sinks {
			have += of(c)
		}
		if have == want {
			return nil
		}
		if have > want || time.Since(begin) > idleLimit {
			return fmt.Errorf("%s: %d %s, want %d", f.name, have, what, want)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (f *fastSite) sum(of func(*counters) int64) (n int64) {
	for _, c := range f.sinks {
		n += of(c)
	}
	return n
}

func readDatagrams(c *counters) int64 { return c.datagrams.Load() }
func readBytes(c *counters) int64     { return c.bytes.Load() }
func accepted(c *counters) int64      { return c.accepted.Load() }
func closed(c *counters) int64        { return c.closed.Load() }

// cost returns the CPU time of the site for one message (datagram, connection), in µs. send transfers n
// messages and returns after all have arrived.
func (f *fastSite) cost(n int, send func() error) (float64, error) {
	before, err := f.cpu()
	if err != nil {
		return 0, err
	}
	if err := send(); err != nil {
		return 0, err
	}
	time.Sleep(2 * time.Millisecond) // the reader of the last message goes to sleep, and this is charged
	after, err := f.cpu()
	return float64((after - before).Nanoseconds()) / 1000 / float64(n), err
}

// datagrams sends n datagrams, from one device after the other, and returns the cost of one.
func (f *fastSite) datagrams(ctx context.Context, n int) (float64, error) {
	return f.cost(n, func() error {
		have := f.sum(readDatagrams)
		for sent := 0; sent < n; {
			for range min(window, n-sent) {
				if err := sendDatagram(ctx, f.udp[sent%len(f.udp)], f.message); err != nil {
					return fmt.Errorf("%s: send a datagram: %w", f.name, err)
				}
				sent++
			}
			if err := f.await(ctx, "datagrams", readDatagrams, have+int64(sent)); err != nil {
				return err
			}
		}
		return nil
	})
}

// messages sends n messages over the connections, at most one at a time on each, and returns the cost of
// one.
func (f *fastSite) messages(ctx context.Context, n int) (float64, error) {
	return f.cost(n, func() error {
		have := f.sum(readBytes)
		for sent := 0; sent < n; {
			for range min(window, len(f.tcp), n-sent) {
				if _, err := f.tcp[sent%len(f.tcp)].Write(f.message); err != nil {
					return fmt.Errorf("%s: send a message: %w", f.name, err)
				}
				sent++
			}
			if err := f.await(ctx, "bytes", readBytes, have+int64(sent*messageSize)); err != nil {
				return err
			}
		}
		return nil
	})
}

// connections opens and closes n connections, and returns the cost of one.
func (f *fastSite) connections(ctx context.Context, d *routers.Dialer, devices []netip.Addr, n int) (float64, error) {
	return f.cost(n, func() error {
		came, went := f.sum(accepted), f.sum(closed)
		var open []net.Conn
		for made := 0; made < n; {
			for range min(window, n-made) {
				c, err := d.Dial("tcp", devices[made%len(devices)], f.to)
				if err != nil {
					return err
				}
				open = append(open, c)
				made++
			}
			err := f.await(ctx, "connections", accepted, came+int64(made))
			for _, c := range open {
				c.Close()
			}
			open = open[:0]
			if err == nil {
				err = f.await(ctx, "closed connections", closed, went+int64(made))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// reportDrops makes a socket report datagrams dropped by its own host. Without IP_RECVERR the kernel does
// not report them.
func reportDrops(c net.Conn) error {
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_RECVERR, 1)
	}), err)
}

// sendDatagram sends a datagram, and repeats it if the wire is full: a veth device does not block its
// sender.
func sendDatagram(ctx context.Context, c net.Conn, b []byte) error {
	for {
		_, err := c.Write(b)
		if !errors.Is(err, unix.ENOBUFS) || ctx.Err() != nil {
			return err
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// ipfix returns an IPFIX message of this size with one data set (RFC 7011 section 3). A tee reads its
// header.
func ipfix(size int) []byte {
	b := make([]byte, size)
	binary.BigEndian.PutUint16(b, 10)
	binary.BigEndian.PutUint16(b[2:], uint16(size))
	binary.BigEndian.PutUint16(b[16:], 256)
	binary.BigEndian.PutUint16(b[18:], uint16(size-16))
	return b
}
