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

// bufferName is the device of buffered packets: one in a network namespace, as the quarantine.
const bufferName = "weir-buffer"

// makeBuffer makes it. It goes with this process, and packets that wait in it with it: clients send them again.
func makeBuffer(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	return packetbuf.Again(func() (*packetbuf.Device[repair.Flow], error) { return newBuffer(ns) })
}

func newBuffer(ns *netns.Handle) (d *packetbuf.Device[repair.Flow], err error) {
	err = ns.Do(func() (err error) {
		d, err = packetbuf.New(bufferName, false, func(from, to netip.AddrPort, proto uint8) (repair.Flow, bool) {
			return repair.Flow{Local: to, Remote: from}, proto == unix.IPPROTO_TCP
		})
		if err == nil {
			// It has no address, and says nothing by itself. Where that cannot be set, what it says is dropped.
			_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+bufferName+"/disable_ipv6", []byte("1"), 0)
		}
		return err
	})
	return d, err
}

// Buffer lets nothing reach a session's socket, as shut, and has the session's packets wait at this backend until release.
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

// Buffers says whether packets can wait here.
func (g *Quarantine) Buffers() bool { return g.buffer != nil }

// ErrNoBuffer says that packets cannot wait here: there is no device for them.
var ErrNoBuffer = errors.New("packets cannot be buffered at this backend")

// BufferShut has packets wait that a shut quarantine would send back. ok is false if the quarantine is not shut by that move.
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

// Release has the packets of a session that wait here go on, in the order in which they came, and from then on those that come:
// shut sends them back to the load balancer, pass lets them to the socket. It is changed first: the load balancer may send here again what was
// sent back to it.
func (g *Quarantine) Release(f repair.Flow, e move.Epoch, to State) error {
	err := g.buffer.FlushAfter(f, func() error { return g.leaveRecord(f, e, to) })
	if err != nil {
		return fmt.Errorf("the quarantine for %s: %w", f, err)
	}
	return nil
}

// leaveRecord has a session whose packets wait be something else.
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
	v.What, v.Since = uint32(to), kernel.Monotonic() // the interface stays: some packets may be on their way to the device
	err = g.sessions.Update(quarantineKey(f), &v, ebpf.UpdateExist)
	return err == nil, err
}

// takeOver has packets of sessions wait no longer that an agent before us has had wait: it has lost those that waited.
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

// Late sends back what was on its way to the device of buffered packets when its session was released.
func (g *Quarantine) Late() error {
	if g.buffer == nil {
		return nil
	}
	return g.buffer.Collect()
}
