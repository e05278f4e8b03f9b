// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/reroutecost/bpf"
)

const (
	streamPort = 4739    // STREAM_PORT
	streamMax  = 1 << 22 // STREAM_MAX
	streamGap  = 20 * time.Microsecond
)

// flip sends a numbered stream through the chain while its link is drained and undrained, and counts lost
// packets.
func (x *experiment) flip(ctx context.Context) error {
	x.say("a numbered stream over %d drains and undrains of its link", x.flips)
	c, err := x.newChain()
	if err != nil {
		return err
	}
	root := kernel.OpenRoot(x.env.Root)
	repair := protect.Repair{Segments: []netip.Addr{netip.MustParseAddr(sidVia), netip.MustParseAddr(sidOut)}}
	if err := apply(ctx, x.env, root, protect.Config{Paths: []protect.Path{{Name: "flip", Netns: c.names["r1"], Device: "main", Repairs: []protect.Repair{repair}}}}); err != nil {
		return err
	}
	if err := watchFor(ctx, x, root); err != nil {
		return err
	}
	judge, err := x.newJudge(c)
	if err != nil {
		return err
	}
	var stop atomic.Bool
	sent := make(chan error, 1)
	n := 0
	go func() {
		sent <- c.ns["s"].Do(func() error {
			conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(hostD), streamPort)))
			if err != nil {
				return err
			}
			defer conn.Close()
			return onOneCPU(runtime.NumCPU()-1, func() (err error) { n, err = stream(conn, &stop); return err })
		})
	}()
	err = flipAll(ctx, root, x.flips)
	stop.Store(true)
	if err = errors.Join(err, <-sent); err != nil {
		return err
	}
	return x.judged(judge, root, n)
}

// flipAll drains and undrains by the same calls as an operator. It releases the lock now and then for the
// watcher.
func flipAll(ctx context.Context, root *kernel.Root, n int) error {
	const atOnce = 25
	for done := 0; done < n; done += atOnce {
		err := locked(ctx, root, func(l *kernel.WriteLock) error {
			for range min(atOnce, n-done) {
				if err := errors.Join(protect.Drain(l, "flip"), protect.Undrain(l, "flip")); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// stream sends numbers until stopped, and returns their count. A packet rejected by the socket is not
// counted.
func stream(c *net.UDPConn, stop *atomic.Bool) (n int, err error) {
	b := make([]byte, 200)
	next := time.Now()
	for ; !stop.Load() && n < streamMax; n++ {
		binary.BigEndian.PutUint32(b, uint32(n))
		if _, err := c.Write(b); err != nil {
			return n, fmt.Errorf("packet %d of the stream: %w", n, err)
		}
		for next = next.Add(streamGap); time.Now().Before(next); {
		}
		if late := time.Now(); late.Sub(next) > time.Millisecond {
			next = late // no burst after a stall of the machine: queues would drop it
		}
	}
	return n, nil
}

// newJudge attaches the program to check the stream at d.
func (x *experiment) newJudge(c *chain) (*kernel.Collection, error) {
	spec, err := bpf.LoadCost()
	if err != nil {
		return nil, err
	}
	p, err := kernel.Load(spec, []string{"judge"}, nil)
	if err != nil {
		return nil, err
	}
	x.env.OnClose(p.Close)
	return p, c.ns["d"].Do(func() error {
		l, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		ln, err := kernel.TCX{Ifindex: l.Attrs().Index, Device: "in"}.Attach(p.Programs["judge"])
		if err == nil {
			x.env.OnClose(func() { ln.Close() })
		}
		return err
	})
}

// judged waits for the arrival of the last packet, and reports missing ones.
func (x *experiment) judged(judge *kernel.Collection, root *kernel.Root, n int) error {
	var s bpf.CostSequence
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err := judge.Variables["stream"].Get(&s); err != nil {
			return err
		}
		if int(s.Came-s.Twice) >= n || time.Now().After(end) {
			break
		}
	}
	st, err := protect.ReadState(context.Background(), root)
	if err != nil {
		return err
	}
	for _, p := range st.Paths {
		if p.Name != "flip" {
			continue
		}
		x.result.Set("flip_rerouted", float64(p.Counts.Packets))
		x.result.Set("flip_rerouted_fast", float64(p.Counts.Fast))
		if p.Counts.Packets == 0 || int(p.Counts.Packets) >= n {
			return fmt.Errorf("of %d packets %d were rerouted: the link did not go down and up under the stream", n, p.Counts.Packets)
		}
	}
	x.result.Set("flips", float64(x.flips))
	x.result.Set("flip_packets", float64(n))
	x.result.Set("lost_in_flips", float64(n)-float64(s.Came-s.Twice)+float64(s.Beyond))
	x.result.Set("doubled_in_flips", float64(s.Twice))
	x.result.Set("reordered_in_flips", float64(s.Behind))
	return nil
}
