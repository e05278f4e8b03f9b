// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// bufferName is the name of the buffer device. Each network namespace has one.
const bufferName = "weir-buffer"

// makeBuffer creates the buffer device. It ends with this process, and so do the packets in it: clients retransmit
// them.
func makeBuffer(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	return packetbuf.Again(func() (*packetbuf.Device[repair.Flow], error) { return newBuffer(ns) })
}

func newBuffer(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	err = ns.Do(func() (err error) {
		d, err = packetbuf.New(bufferName, false, func(from, to netip.AddrPort, proto uint8) (repair.Flow, bool) {
			return repair.Flow{Local: to, Remote: from}, proto == unix.IPPROTO_TCP
		})
		if err == nil {
			// The device needs no address, and must not send packets of its own. If this fails, they are dropped.
			_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+bufferName+"/disable_ipv6", []byte("1"), 0)
		}
		return err
	})
	return d, err
}

// Buffer blocks a session's socket, like Shut, and buffers its packets at this backend until Release.
func (g *Quarantine) Buffer(f repair.Flow, e move.Epoch) error {
	if g.buffer == nil {
		return ErrNoBuffer
	}
	g.buffer.Expect(f)
	if err := g.put(f, Buffered, e); err != nil {
		g.buffer.Forget(f)
		return err
	}
	return nil
}

// Buffers reports whether this backend can buffer packets.
func (g *Quarantine) Buffers() bool { return g.buffer != nil }

// ErrNoBuffer means packets cannot be buffered here: the device is missing.
var ErrNoBuffer = errors.New("packets cannot be buffered at this backend")

// BufferShut starts buffering packets that a shut quarantine would send back. ok is false if the quarantine is not
// shut by that move.
func (g *Quarantine) BufferShut(f repair.Flow, e move.Epoch) (ok bool, err error) {
	if g.buffer == nil {
		return false, nil
	}
	g.buffer.Expect(f)
	if ok, err = g.become(f, e, Shut, Buffered); !ok {
		g.buffer.Forget(f)
	}
	return ok, err
}

// Release forwards a session's buffered packets in their order of arrival, and applies a new state to later packets.
// Shut sends them back to the load balancer, Pass lets them through to the socket. The state changes first, because
// the load balancer may return packets sent back to it.
func (g *Quarantine) Release(f repair.Flow, e move.Epoch, to State) error {
	err := g.buffer.FlushAfter(f, func() error { return g.leaveRecord(f, e, to) })
	if err != nil {
		return fmt.Errorf("quarantine of %s: %w", f, err)
	}
	return nil
}

// leaveRecord changes the state of a session with buffered packets.
func (g *Quarantine) leaveRecord(f repair.Flow, e move.Epoch, to State) error {
	_, err := g.become(f, e, Buffered, to)
	return err
}

// become changes the state of a session by that move. ok is false if it is in another state, or of another move.
func (g *Quarantine) become(f repair.Flow, e move.Epoch, from, to State) (ok bool, err error) {
	g.changing.Lock()
	defer g.changing.Unlock()
	var v bpf.QuarantineQuarantineEntry
	if err := g.sessions.Lookup(quarantineKey(f), &v); err != nil || State(v.What) != from || v.Epoch != uint32(e) {
		return false, nil
	}
	v.What, v.Since = uint32(to), kernel.Monotonic() // keep the interface: some packets may be under way to the device
	err = g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist)
	return err == nil, err
}

// takeOver ends the buffering of an earlier agent. Its buffered packets are lost.
func (g *Quarantine) takeOver() error {
	all, err := g.Entries()
	for _, e := range all {
		if e.State == Left {
			g.gone = append(g.gone, e.Flow)
		}
		if e.State == Buffered {
			err = errors.Join(err, g.leaveRecord(e.Flow, e.Epoch, Shut))
		}
	}
	return errors.Join(err, g.Late())
}

// Late sends back packets that were under way to the buffer device when their session was released.
func (g *Quarantine) Late() error {
	if g.buffer == nil {
		return nil
	}
	return g.buffer.Collect()
}
