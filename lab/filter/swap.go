// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

// Both rule sets drop the first port. Of the other ports each set drops one and counts the other. The rules
// therefore count exactly the sent packets: a packet past no set is missing, and a packet past both counts
// twice. No packet to the first port arrives.
var swapPorts = []uint16{5000, 5001, 5002}

func swapName(port uint16) string  { return fmt.Sprint("p", port) }
func swapMatch(port uint16) string { return fmt.Sprint("udp.dstport == ", port) }

// dropsIn reports whether one of the two sets drops a port.
func dropsIn(set int, port uint16) bool { return port == swapPorts[0] || port == swapPorts[1+set%2] }

// swapper exchanges the rule sets at one hook.
type swapper struct {
	name   string
	to     func(set int) error
	counts func() (map[string]uint64, error)
	close  func()
}

// swaps exchanges rules under a flood, at each hook.
func (x *experiment) swaps(ctx context.Context) error {
	x.say("rules exchanged under a flood, %s at each hook: searching packets past neither set, or both", x.swapFor)
	wrong := 0.0
	for _, h := range productHooks {
		w, err := newWorld(x.env, "swap-"+string(h.hook), true)
		if err != nil {
			return err
		}
		s := productSwapper(ctx, w, product{kernel.OpenRoot(x.env.Root)}, h.hook)
		n, err := x.swapUnderFlood(ctx, w, s, nil)
		if err != nil {
			return fmt.Errorf("changing rules at %s: %w", s.name, err)
		}
		wrong += n
	}
	w, err := newWorld(x.env, "swap-socket", true)
	if err != nil {
		return err
	}
	sinks, err := swapSinks(w)
	if err != nil {
		return err
	}
	s, err := socketSwapper(sinks)
	if err != nil {
		return err
	}
	n, err := x.swapUnderFlood(ctx, w, s, sinks)
	if err != nil {
		return fmt.Errorf("changing rules at a socket: %w", err)
	}
	x.result.Set("swap_misverdicts", wrong+n)
	return nil
}

func productSwapper(ctx context.Context, w *world, p product, h filter.Hook) *swapper {
	return &swapper{name: string(h),
		to: func(set int) error {
			var rules []filter.Rule
			for _, port := range swapPorts {
				r := filter.Rule{Name: swapName(port), Match: filter.Expression{Text: swapMatch(port)}, Action: filter.Count}
				if dropsIn(set, port) {
					r.Action = filter.Drop
				}
				rules = append(rules, r)
			}
			return p.apply(ctx, filterAt(w, h, rules...))
		},
		counts: func() (map[string]uint64, error) { return p.counts(ctx) },
		close:  func() { _ = p.apply(context.WithoutCancel(ctx)) }, // leftovers reports failures
	}
}

// socketSwapper exchanges two programs on all the sockets. Each program has its own counters.
func socketSwapper(sinks []*net.UDPConn) (*swapper, error) {
	var progs [2]*ebpf.Program
	var counts [2]counter
	var closers []func()
	for set := range progs {
		var rules []compile.Rule
		for _, port := range swapPorts {
			r := compile.Rule{Name: swapName(port), Match: expr.MustParse(swapMatch(port)), Action: compile.Count}
			if dropsIn(set, port) {
				r.Action = compile.Drop
			}
			rules = append(rules, r)
		}
		prog, c, unload, err := load(rules, compile.Options{Hook: compile.Socket})
		if err != nil {
			return nil, err
		}
		progs[set], counts[set] = prog, c
		closers = append(closers, unload)
	}
	held := make([]hook.SocketFilter, len(sinks))
	return &swapper{name: "socket",
		to: func(set int) (err error) {
			for i, c := range sinks {
				err = errors.Join(err, onSocket(c, func(fd int) error {
					held[i].FD, held[i].Name = fd, c.LocalAddr().String()
					return held[i].Attach(progs[set%2])
				}))
			}
			return err
		},
		counts: func() (map[string]uint64, error) {
			out := map[string]uint64{}
			for _, c := range counts {
				got, err := c.read()
				if err != nil {
					return nil, err
				}
				for i, port := range swapPorts {
					out[swapName(port)] += got[i]
				}
			}
			return out, nil
		},
		close: func() {
			for _, f := range closers {
				f()
			}
		},
	}, nil
}

// swapSinks opens the receiving sockets of the flood.
func swapSinks(w *world) (sinks []*net.UDPConn, err error) {
	err = w.host.Do(func() error {
		for _, port := range swapPorts {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv6Unspecified(), port)))
			if err != nil {
				return err
			}
			sinks = append(sinks, c)
		}
		return nil
	})
	return sinks, err
}

// fewest is the number of packets needed to detect packets past none or both of the sets.
const fewest = 1000

// swapUnderFlood returns the number of packets without exactly one whole set.
func (x *experiment) swapUnderFlood(ctx context.Context, w *world, s *swapper, sinks []*net.UDPConn) (wrong float64, err error) {
	defer s.close()
	if sinks == nil {
		if sinks, err = swapSinks(w); err != nil {
			return 0, err
		}
	}
	defer func() {
		for _, c := range sinks {
			c.Close()
		}
	}()
	if err := s.to(0); err != nil {
		return 0, err
	}
	f, err := startFlood(w)
	if err != nil {
		return 0, err
	}
	swaps, begin := 0, time.Now()
	enough := func() bool { // a stalled machine takes longer
		return time.Since(begin) > x.swapFor && swaps >= 4 && f.tried.Load() >= 2*fewest || time.Since(begin) > time.Minute
	}
	for ; !enough() && ctx.Err() == nil; swaps++ {
		if err = s.to(swaps + 1); err != nil {
			break
		}
	}
	sent, lost, e := f.stop()
	if err = errors.Join(err, e, ctx.Err()); err != nil {
		return 0, err
	}
	var total uint64
	for _, n := range sent {
		total += n
	}
	counted, err := s.finalCounts(ctx, total-lost)
	if err != nil {
		return 0, err
	}
	if lost == 0 {
		for _, port := range swapPorts {
			wrong += difference(counted[swapName(port)], sent[port])
		}
	} else { // the wire does not count lost packets by port
		wrong = difference(sum(counted)+lost, total)
	}
	if total < fewest || swaps < 4 {
		return 0, fmt.Errorf("only %d packets and %d changes: too few for a result", total, swaps)
	}
	arrived, err := drain(sinks[0])
	if err != nil {
		return 0, err
	}
	wrong += float64(arrived)
	if wrong > 0 {
		x.result.Note("%s: %d changes, %d packets sent: %v, %d of them lost on the wire; counted %v; %d arrived at the port dropped by both sets", s.name, swaps, total, sent, lost, counted, arrived)
	}
	x.result.Set("swaps_"+s.name, float64(swaps))
	x.result.Set("swap_packets_"+s.name, float64(total))
	return wrong, nil
}

// finalCounts returns the counts when they reach want, or when patience ends, because packets may still be
// in transit. Double counts also get this time.
func (s *swapper) finalCounts(ctx context.Context, want uint64) (map[string]uint64, error) {
	const patience = 5 * time.Second
	for deadline := time.Now().Add(patience); ; {
		last := time.Now().After(deadline)
		counted, err := s.counts()
		enough := sum(counted) >= want
		if err = errors.Join(err, ctx.Err()); err != nil || last {
			return counted, err
		}
		time.Sleep(20 * time.Millisecond)
		if enough {
			return s.counts()
		}
	}
}

// sum returns the packets counted by the swaps' rules. It excludes the default, because the default counts
// packets of counting rules again.
func sum(counted map[string]uint64) (n uint64) {
	for _, port := range swapPorts {
		n += counted[swapName(port)]
	}
	return n
}

func difference(a, b uint64) float64 { return float64(max(a, b) - min(a, b)) }

// drain reads all packets of a socket.
func drain(c *net.UDPConn) (n int, err error) {
	err = onSocket(c, func(fd int) error {
		for b := make([]byte, 64); ; n++ {
			if _, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
				return nil
			} else if err != nil {
				return err
			}
		}
	})
	return n, err
}
