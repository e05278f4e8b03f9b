// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/backend/bpf"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// parkName is the device of buffered packets: one in a network namespace, as the quarantine.
const parkName = "weir-buffer"

// makePark makes it. It goes with this process, and packets that wait in it with it: clients send them again.
func makePark(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	return packetbuf.Again(func() (*packetbuf.Device[repair.Flow], error) { return newPark(ns) })
}

func newPark(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	err = ns.Do(func() (err error) {
		d, err = packetbuf.New(parkName, false, func(from, to netip.AddrPort, proto uint8) (repair.Flow, bool) {
			return repair.Flow{Local: to, Remote: from}, proto == unix.IPPROTO_TCP
		})
		if err == nil {
			// It has no address, and says nothing by itself. Where that cannot be set, what it says is dropped.
			_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+parkName+"/disable_ipv6", []byte("1"), 0)
		}
		return err
	})
	return d, err
}

// park lets nothing reach a session's socket, as shut, and has the session's packets wait at this backend until release.
func (g *Quarantine) park(f repair.Flow, e move.Epoch) error {
	if g.buffer == nil {
		return errNoPark
	}
	g.buffer.Expect(f)
	if err := g.put(f, park, e); err != nil {
		g.buffer.Forget(f)
		return err
	}
	return nil
}

// parks says whether packets can wait here.
func (g *Quarantine) parks() bool { return g.buffer != nil }

var errNoPark = errors.New("packets cannot be buffered at this backend")

// parkShut has packets wait that a shut quarantine would send back. ok is false if the quarantine is not shut by that move.
func (g *Quarantine) parkShut(f repair.Flow, e move.Epoch) (ok bool, err error) {
	if g.buffer == nil {
		return false, nil
	}
	g.buffer.Expect(f)
	if ok, err = g.become(f, e, shut, park); !ok {
		g.buffer.Forget(f)
	}
	return ok, err
}

// release has the packets of a session that wait here go on, in the order in which they came, and from then on those that come:
// shut sends them back to the load balancer, pass lets them to the socket. It is changed first: the load balancer may send here again what was
// sent back to it.
func (g *Quarantine) release(f repair.Flow, e move.Epoch, to uint32) error {
	err := g.buffer.FlushAfter(f, func() error { return g.leave(f, e, to) })
	if err != nil {
		return fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	return nil
}

// leave has a session whose packets wait be something else.
func (g *Quarantine) leave(f repair.Flow, e move.Epoch, to uint32) error {
	_, err := g.become(f, e, park, to)
	return err
}

// become changes the state of a session by that move. ok is false if it is in another state, or of another move.
func (g *Quarantine) become(f repair.Flow, e move.Epoch, from, to uint32) (ok bool, err error) {
	g.changing.Lock()
	defer g.changing.Unlock()
	var v bpf.QuarantineQuarantineEntry
	if err := g.sessions.Lookup(quarantineKey(f), &v); err != nil || v.What != from || v.Epoch != uint32(e) {
		return false, nil
	}
	v.What, v.Since = to, kernel.Monotonic() // the interface stays: some packets may be on their way to the device
	err = g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist)
	return err == nil, err
}

// takeUp has packets of sessions wait no longer that an agent before us has had wait: it has lost those that waited.
func (g *Quarantine) takeUp() error {
	all, err := g.entries()
	for _, e := range all {
		if e.What == left {
			g.gone = append(g.gone, e.Flow)
		}
		if e.What == park {
			err = errors.Join(err, g.leave(e.Flow, e.Epoch, shut))
		}
	}
	return errors.Join(err, g.late())
}

// late sends back what was on its way to the device of buffered packets when its session was released.
func (g *Quarantine) late() error {
	if g.buffer == nil {
		return nil
	}
	return g.buffer.Collect()
}

// await has packets wait here until it is known whether the session stays. The load balancer answers a Reclaim and sends what it held at
// once, before this agent knows: sent back it would go to and fro, and soon be dropped. s.mu is held.
func (a *Agent) await(s *leaving) {
	if s.parked {
		return
	}
	var err error
	if s.parked, err = a.quarantine.parkShut(s.flow, s.kept.Epoch); err != nil {
		a.o.Log.Warn("packets may be lost: their client sends them again", "flow", s.flow, "err", err)
	}
}

// release has packets that wait here go to the session's socket, if it stays here, or back to the load balancer: it has them wait, or
// passes them to whoever owns the session.
func (a *Agent) release(s *leaving, stays bool) {
	if !s.parked {
		return
	}
	s.parked = false
	to := uint32(shut)
	if stays {
		to = pass
	}
	if err := a.quarantine.release(s.flow, s.kept.Epoch, to); err != nil {
		a.o.Log.Warn("a session's packets are lost: its client sends them again", "flow", s.flow, "err", err)
	}
	time.AfterFunc(tick, func() {
		if err := a.quarantine.late(); err != nil {
			a.o.Log.Warn("packets are lost: their clients send them again", "err", err)
		}
	})
}
