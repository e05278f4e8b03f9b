// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
)

// collectorsEach is the number of collectors of each way.
const collectorsEach = 2

// The ways from routers' telemetry to one of several collectors.
const (
	direct   = "direct"   // every router is configured with the address and port of its collector: the floor
	existing = "existing" // HAProxy for BMP, nfacctd as a tee for IPFIX, with a table each
	weir     = "weir"
)

// way is one of these ways, with real collectors.
type way struct {
	*site
	collectors []*peers.Collector
	sockets    []*rig.SocketWatch // by collector
	lanes      []*lane            // by device
	tally      *tally
	between    []*lab.Process // intermediaries
	flows      atomic.Int32   // whether the first collector's routers send flow records; see restart.go
}

// newWay creates a site and starts its collectors. They open their sockets some seconds later.
func newWay(ctx context.Context, w *world, name string, first, maxPeers int) (*way, error) {
	s, err := w.site(name)
	if err != nil {
		return nil, err
	}
	y := &way{site: s, tally: newTally()}
	for i := range collectorsEach {
		c, err := peers.NewCollector(w.env, s.ns, first+i, y.collectorPort(i), maxPeers)
		if err != nil {
			return nil, err
		}
		c.Buffer = 64 << 10 // as advised by its documentation for this traffic
		c.Proxied = name == existing || name == proxied
		// nfacctd touches 2 MB for every session. With pages of 4 kB this keeps a core busy.
		c.Env = []string{"GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"}
		y.collectors = append(y.collectors, c)
		if err := y.launch(c); err != nil {
			return nil, err
		}
		watch := rig.WatchSockets(s.Handle, uint16(y.collectorPort(i)))
		w.env.OnClose(watch.Stop)
		y.sockets = append(y.sockets, watch)
		// nfacctd's plugin misses its core most often with simultaneous starts.
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
	return y, nil
}

// launch starts a collector; its cost belongs to the site.
func (y *way) launch(c *peers.Collector) error {
	if err := c.Start(); err != nil {
		return err
	}
	return y.group.Claim(c.PID())
}

// collectorPort returns the port of a collector: a separate one, or with weir a shared one.
func (y *way) collectorPort(i int) int {
	if y.name == weir {
		return port
	}
	return port + 1 + i
}

// target returns the destination of a router.
func (y *way) target(collector int) netip.AddrPort {
	if y.name == direct {
		return netip.AddrPortFrom(y.addr, uint16(y.collectorPort(collector)))
	}
	return y.service()
}

// relay starts the intermediaries of the existing way.
func (s *site) relay(e *lab.Env, place map[netip.Addr]int, to []netip.AddrPort, header bool) ([]*lab.Process, error) {
	proxy := peers.Proxy{Listen: s.service(), Backlog: backlog, Backends: to, Collector: place, Header: header}
	p, err := proxy.Start(e, s.ns)
	if err != nil {
		return nil, err
	}
	tee := peers.Tee{Listen: s.service(), Receivers: to, Collector: place}
	t, err := tee.Start(e, s.ns)
	if err != nil {
		return nil, err
	}
	for _, p := range []*lab.Process{p, t} {
		if err := s.group.Claim(p.PID); err != nil {
			return nil, err
		}
	}
	return []*lab.Process{p, t}, nil
}

// relayed waits until the intermediaries have their sockets.
func (s *site) relayed(ctx context.Context, between []*lab.Process) error {
	for begin := time.Now(); ; {
		n := 0
		for _, p := range between {
			if !p.Running() {
				return fmt.Errorf("%s has ended: %w", p.Name, p.Err())
			}
			if held, err := s.tune(p.PID, port); err == nil {
				n += held
			}
		}
		if n >= len(between) {
			// The tee's sending plugin is a child, started after its socket.
			for _, p := range between {
				if err := s.group.Claim(p.PID); err != nil {
					return err
				}
			}
			return nil
		}
		if time.Since(begin) > returnLimit {
			return fmt.Errorf("HAProxy and nfacctd as a tee have opened %d of %d sockets after %s", n, len(between), returnLimit)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// returnLimit is the longest time from a daemon's start to its sockets. nfacctd takes 6 s, and more if
// several start on two cores.
const returnLimit = 60 * time.Second

// ready waits until a collector has its sockets, and tunes them like weir tunes its members' sockets.
func (y *way) ready(ctx context.Context, i int) error {
	c := y.collectors[i]
	if _, err := y.sockets[i].Appear(ctx, c, returnLimit); err != nil {
		return err
	}
	if err := y.group.Claim(c.PID()); err != nil { // and its plugins
		return err
	}
	if y.name == weir {
		return nil // weir does this itself
	}
	_, err := y.tune(c.PID(), uint16(y.collectorPort(i)))
	return err
}

// tune gives a process's sockets on a port weir's backlog and receive buffer, so neither favours a way. It
// returns the number of sockets.
func (s *site) tune(pid int, port uint16) (n int, err error) {
	p, err := pidfd.Open(pid)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	held, err := p.Sockets()
	if err != nil {
		return 0, err
	}
	err = s.Do(func() error {
		for _, q := range []sockdiag.Query{
			{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_LISTEN, LocalPort: port},
			{Proto: unix.IPPROTO_UDP, LocalPort: port},
		} {
			sockets, err := sockdiag.Dump(q)
			if err != nil {
				return err
			}
			for _, k := range sockets {
				if fds := held[k.Inode]; len(fds) > 0 {
					n++
					if err := tuneSocket(p, fds[0], q.Proto); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
	return n, err
}

func tuneSocket(p *pidfd.Process, fd int, proto uint8) error {
	dup, err := p.Dup(fd)
	if err != nil {
		return err
	}
	defer unix.Close(dup)
	if proto == unix.IPPROTO_TCP {
		return unix.Listen(dup, backlog)
	}
	return unix.SetsockoptInt(dup, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
}

// pause waits for d, or for the end of the run.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
