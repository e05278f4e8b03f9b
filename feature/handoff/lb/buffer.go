// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net/netip"
	"os"
	"sync"

	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/kernel"
)

// bufferDevice buffers packets. The data path redirects packets of buffered flows to it.
type bufferDevice struct {
	*packetbuf.Device[Key]
	mu       sync.Mutex
	services map[listen]Service // by destination and protocol of a packet
}

type listen struct {
	addr  netip.AddrPort
	proto uint8
}

// newBufferDevice creates the device or opens an existing one. With stays the device outlives this process.
func newBufferDevice(name string, stays bool) (h *bufferDevice, err error) {
	h = &bufferDevice{services: map[listen]Service{}}
	h.Device, err = packetbuf.Again(func() (*packetbuf.Device[Key], error) { return packetbuf.New(name, stays, h.flowKey) })
	if err != nil {
		return nil, err
	}
	return h, nil
}

func (h *bufferDevice) flowKey(from, to netip.AddrPort, proto uint8) (Key, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.services[listen{to, proto}]
	if s.BySource {
		from = netip.AddrPortFrom(from.Addr(), 0)
	}
	return Key{Client: from, Service: s.Flows()}, ok
}

// Buffer starts buffering packets of a flow. They wait in the device's queue until Collect, then in memory until Flush.
func (f *DataPath) Buffer(k Key) error {
	f.buffer.Expect(k)
	_, err := f.change(k, kernel.Monotonic()+uint64(f.bufferFor), 0, func(fl *Flow) { fl.Buffered = true })
	if err != nil {
		f.buffer.Forget(k)
	}
	return err
}

// Flush sends the buffered packets of a flow to its owner, in order of arrival, and ends the buffering. It returns their number.
func (f *DataPath) Flush(k Key) (waited int, err error) {
	return f.buffer.Flush(k, func() error {
		_, err := f.Change(k, func(fl *Flow) { fl.Buffered = false })
		return err
	})
}

// Collect moves packets from the device's short queue into memory. See ready.
func (f *DataPath) Collect() error { return f.buffer.Collect() }

// ready returns the device's file. It is readable when there are packets to collect.
func (f *DataPath) ready() (*os.File, error) { return f.buffer.Ready() }
