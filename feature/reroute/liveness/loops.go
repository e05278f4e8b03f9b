// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Loops are the timer loops of a tick source, for other programs. A packet arrives by each device once per tick. The
// last program is liveness', which sends the packet round again.
type Loops struct {
	Tick    time.Duration  // actual tick; others may have requested a shorter one
	Devices map[string]int // output devices of the packets: names to indexes
	// Stalls holds one struct liveness_common: the time (CLOCK_MONOTONIC, ns) a CPU with a loop was last seen
	// stalled.
	Stalls *ebpf.Map
}

// OpenLoops makes the loops of a namespace tick at least every tick, and returns them. The caller closes them.
func OpenLoops(ctx context.Context, l *kernel.WriteLock, ns *netns.Handle, tick time.Duration) (_ *Loops, err error) {
	scope := netnsScope(ns)
	p, err := readPublished(l.Root, scope)
	if errors.Is(err, kernel.ErrNotExist) || err == nil && (p.Config.Tick == 0 || p.Config.Tick > tick) {
		p.Config.Tick = tick
		err = ns.Do(func() error { return become(ctx, l, p.Config) })
	}
	if err != nil {
		return nil, err
	}
	s, err := openInstance(l, scope)
	if err != nil {
		return nil, err
	}
	defer s.close()
	out := &Loops{Tick: s.p.Config.tick(), Devices: map[string]int{}}
	err = ns.Do(func() error {
		cpus, err := loopCPUs(s.p.Config.CPUs)
		if err != nil {
			return err
		}
		loops, err := makeLoops(cpus, out.Tick)
		for i, l := range loops {
			out.Devices[exitName(i)] = l.exit
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("creating the timer loops: %w", err)
	}
	out.Stalls, err = s.pins.Maps[pinShared].Clone()
	return out, err
}

// become applies a configuration to the calling thread's namespace.
func become(ctx context.Context, l *kernel.WriteLock, c Config) error {
	st, err := ReadState(ctx, l.Root)
	if err != nil {
		return err
	}
	c.Netns = ""
	plan, err := Plan(ctx, st, c)
	if err != nil {
		return err
	}
	return Apply(ctx, l, plan)
}

// DropLoops ends the loops of a namespace without sessions.
func DropLoops(l *kernel.WriteLock, scope string) error {
	p, err := readPublished(l.Root, scope)
	if errors.Is(err, kernel.ErrNotExist) || err == nil && len(p.Config.Sessions) > 0 {
		return nil
	} else if err != nil {
		return err
	}
	return remove(l, scope)
}
