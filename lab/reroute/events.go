// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
)

// event is a change of a verdict, at r1 or at r2.
type event struct {
	near bool // r1
	liveness.Event
}

// verdict identifies a session reported down, and the reporting end.
type verdict struct {
	near bool
	id   uint32
}

// listen sends the events of both ends to one channel, with the kernel's timestamps.
func (x *experiment) listen(ctx context.Context) error {
	x.events = make(chan event, 4096)
	ctx, cancel := context.WithCancel(ctx)
	x.env.OnClose(cancel)
	for near, ns := range map[bool]*netns.Handle{true: x.world.r1, false: x.world.r2} {
		go func() {
			err := liveness.Events(ctx, x.world.root, ns.Inode(), func(e liveness.Event) bool {
				x.events <- event{near, e}
				return true
			})
			if err != nil && ctx.Err() == nil {
				x.env.Watch.Log("events of a router: %v", err)
			}
		}()
	}
	time.Sleep(50 * time.Millisecond) // until they listen
	return nil
}

func (x *experiment) drainEvents() {
	for {
		select {
		case <-x.events:
		default:
			return
		}
	}
}

// verdicts waits until both ends report the main link down, and r1 the second. It returns their times after
// the cut.
func (x *experiment) verdicts(moment uint64) map[verdict]time.Duration {
	out := map[verdict]time.Duration{}
	late := time.After(patience)
	for len(out) < 4 {
		select {
		case e := <-x.events:
			v := verdict{e.near, e.ID}
			if _, known := out[v]; e.Phase == liveness.Down && e.Time >= moment && !known {
				out[v] = time.Duration(e.Time - moment)
			}
		case <-late:
			return out
		}
	}
	return out
}

// stream sends numbered datagrams from s to d, one a millisecond.
type stream struct {
	sent, came atomic.Uint64
}

func newStream(e *lab.Env, s, d *netns.Handle) (*stream, error) {
	at := netip.MustParseAddrPort("[fd00:d::2]:9000")
	to, err := listenUDP(d, at)
	if err != nil {
		return nil, fmt.Errorf("open the receiver of the stream: %w", err)
	}
	from, err := listenUDP(s, netip.MustParseAddrPort("[fd00:a::2]:9001"))
	if err != nil {
		return nil, fmt.Errorf("open the sender of the stream: %w", err)
	}
	out := &stream{}
	stop := make(chan struct{})
	e.OnClose(func() { close(stop); to.Close(); from.Close() })
	go func() {
		b := make([]byte, 64)
		for {
			if _, err := to.Read(b); err != nil {
				return
			}
			out.came.Add(1)
		}
	}()
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if _, err := from.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, out.sent.Load()), at); err == nil {
				out.sent.Add(1)
			}
		}
	}()
	return out, nil
}

func listenUDP(ns *netns.Handle, at netip.AddrPort) (c *net.UDPConn, err error) {
	err = ns.Do(func() error {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	return c, err
}

// lost returns the number of datagrams lost or in transit.
func (s *stream) lost() uint64 {
	came := s.came.Load()
	return s.sent.Load() - came
}
