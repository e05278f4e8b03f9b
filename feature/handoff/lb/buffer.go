// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net/netip"
	"os"
	"sync"

	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/kernel"
)

// bufferDevice is the device to which the data path redirects the packets of buffered flows.
type bufferDevice struct {
	*packetbuf.Device[Key]
	mu       sync.Mutex
	services map[listen]Service // by what a frame says
}

// listen is where a service is.
type listen struct {
	addr  netip.AddrPort
	proto uint8
}

// newBufferDevice makes the device, or takes the one that is there. stays: it is there without us, too.
func newBufferDevice(name string, stays bool) (h *bufferDevice, err error) {
	h = &bufferDevice{services: map[listen]Service{}}
	h.Device, err = packetbuf.Again(func() (*packetbuf.Device[Key], error) { return packetbuf.New(name, stays, h.flowKey) })
	if err != nil {
		return nil, err
	}
	return h, nil
}

// flowKey is a client's packet's flow.
func (h *bufferDevice) flowKey(from, to netip.AddrPort, proto uint8) (Key, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.services[listen{to, proto}]
	if s.BySource {
		from = netip.AddrPortFrom(from.Addr(), 0)
	}
	return Key{Client: from, Service: s.Flows()}, ok
}

// Buffer has packets of a flow wait, from now on: in the device's queue until Collect, then here, until Unpark.
func (f *DataPath) Buffer(k Key) error {
	f.buffer.Expect(k)
	_, err := f.change(k, kernel.Monotonic()+uint64(f.bufferFor), 0, func(fl *Flow) { fl.Buffered = true })
	if err != nil {
		f.buffer.Forget(k)
	}
	return err
}

// Flush lets the packets of a flow go to its owner, in the order in which they came, and then has those that come go there at
// once. It returns how many waited.
func (f *DataPath) Flush(k Key) (waited int, err error) {
	return f.buffer.Flush(k, func() error {
		_, err := f.Change(k, func(fl *Flow) { fl.Buffered = false })
		return err
	})
}

// Collect takes packets out of the device's queue, which is short: see Ready.
func (f *DataPath) Collect() error { return f.buffer.Collect() }

// ready is the device's file, to wait for packets to collect.
func (f *DataPath) ready() (*os.File, error) { return f.buffer.Ready() }
