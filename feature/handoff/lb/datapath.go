// SPDX-License-Identifier: Apache-2.0

// Package lb is the data path of a load balancer: it spreads new flows of services over backends, keeps each with its owner, and
// parks the packets of one that moves. Package move says who owns a flow and when; the agent that speaks with backends is above.
//
//	f, err := lb.New(lb.Options{Devices: []string{"eth0", "eth1"}})   // in the namespace of the devices
//	err = f.SetService(lb.Service{Listen: vip, Proto: unix.IPPROTO_TCP})
//	err = f.SetBackends(backends)
//
// Backends have the service's address themselves, and their replies pass the load balancer: nothing of a packet is changed but its MAC
// addresses. A backend on a segment with the load balancer gets packets as they are; others get them through a tunnel (package tunnel).
package lb

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/report"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Options say where a load balancer is.
type Options struct {
	// Devices are all interfaces towards clients and backends.
	Devices []string
	// Hold is the name of the device of buffered packets, which is made; "weir-lb-buffer" if empty.
	BufferDevice string
	// TunnelMTU is that of packets to backends at the other end of a tunnel, 0 where there are none: the least MTU of [locate.Location]. A
	// packet that is longer is answered by a Packet Too Big, or goes in fragments where its sender lets it.
	TunnelMTU int
	// TunnelRootPorts drops packets to tunnels from source ports that any user of a backend's host can bind.
	TunnelRootPorts bool `json:",omitempty"`
	// Tunnel is the name of the tunnels' device, which is made; [tunnel.Device] if empty.
	Tunnel string
	// Settle is how long packets of unknown connections wait at most for the backends' agents, if the data path begins anew.
	StartupTimeout time.Duration `json:"-"`
}

// DataPath is a data path. It ends with Close.
type DataPath struct {
	coll         *kernel.Collection
	maps         bpf.LBObjects
	links        map[string]kernel.Link    // by what is pinned
	stays        bool                      // it is pinned: Close leaves it
	devices      map[string]int            // their interfaces, 0 for one that was absent
	filters      []kernel.Clsact           // in place of links
	onChange     atomic.Pointer[func(Key)] // told of flows that the agent changes; nil: nobody is
	full         atomic.Bool               // no sources are learned
	news         atomic.Uint32             // of flows that are learned, for onChange: lb_config.news
	buffer       *bufferDevice
	ns           *netns.Handle
	tunnel       int // interface, or 0
	tunnelMTU    int
	bufferFor    time.Duration
	ended        uint32        // lb_config.ended
	reclaim      uint16        // lb_config.reclaim
	crowded      atomic.Bool   // too many flows stay though their clients have reset them
	unasked      atomic.Bool   // too many flows are known by backends' packets alone
	startupUntil atomic.Uint64 // CLOCK_MONOTONIC in ns: until then packets of unknown connections wait
	mu           sync.Mutex
	backends     []Backend             // nil before SetBackends
	vacant       map[move.Backend]bool // numbers of backends that SetBackends has dropped, and removeBackend not yet
}

// New makes a load balancer in the network namespace of the calling thread, that ends with this process or with Close; see [Open] for
// one that stays. Needs Linux 5.12; before 6.6 (tcx) its programs stay with the devices if the process is killed.
func New(o Options) (_ *DataPath, err error) {
	if err := kernel.Require(Needs); err != nil {
		return nil, err
	}
	f := &DataPath{bufferFor: time.Minute}
	if f.ns, err = netns.Current(); err != nil {
		return nil, err
	}
	if err := f.build(o, nil); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (o Options) filled() Options {
	o.BufferDevice, o.Tunnel = cmp.Or(o.BufferDevice, "weir-lb-buffer"), cmp.Or(o.Tunnel, tunnel.Device)
	return o
}

// devices are those at which lb_in is attached: all interfaces, and the tunnels' device.
func (o Options) devices() []string {
	if o.TunnelMTU > 0 {
		return append(slices.Clone(o.Devices), o.Tunnel)
	}
	return o.Devices
}

// build makes the devices, loads the programs, over maps that there are already if share has them, and attaches them.
func (f *DataPath) build(o Options, share map[string]*ebpf.Map) (err error) {
	o = o.filled()
	if f.buffer, err = newBufferDevice(o.BufferDevice, f.stays); err != nil {
		return err
	}
	if o.TunnelMTU > 0 {
		f.tunnelMTU = o.TunnelMTU
		if f.tunnel, err = tunnel.NewLB(o.Tunnel, o.TunnelMTU); err != nil {
			return err
		}
	}
	if err := f.load(share, o.StartupTimeout); err != nil {
		return err
	}
	if err := f.maps.LbUsers.Put(uint32(0), uint64(oneIf(o.TunnelRootPorts))); err != nil {
		return fmt.Errorf("configuring source ports of tunnels: %w", err)
	}
	f.links = map[string]kernel.Link{}
	if err := f.attachDevices(o.devices(), share != nil); err != nil {
		return err
	}
	return errors.Join(f.attach(kernel.TCX{Ifindex: f.buffer.Ifindex, Device: o.BufferDevice}, f.maps.LbAgain),
		f.attach(kernel.TCX{Ifindex: f.buffer.Ifindex, Device: o.BufferDevice, Egress: true}, f.maps.LbOwn))
}

func (f *DataPath) load(share map[string]*ebpf.Map, settle time.Duration) error {
	spec, err := bpf.LoadLB()
	if err != nil {
		return err
	}
	f.coll, err = kernel.Load(spec, []string{"lb_in", "lb_again", "lb_own", "lb_change"}, share)
	if err != nil {
		return err
	}
	if err := f.coll.Assign(&f.maps); err != nil {
		return err
	}
	if share == nil && settle > 0 {
		f.startupUntil.Store(kernel.Monotonic() + uint64(settle))
	}
	var before bpf.LBLbConfig
	if err := f.maps.LbSetup.Lookup(uint32(0), &before); err != nil {
		return fmt.Errorf("reading the data path's configuration: %w", err)
	}
	f.startupUntil.CompareAndSwap(0, before.Settle)
	f.ended, f.reclaim = before.Ended, before.Reclaim
	f.full.Store(before.Full != 0)
	return errors.Join(f.beginRoom(), f.configure())
}

// configure tells the data path of its devices, and whether sources are learned no more.
func (f *DataPath) configure() error {
	c := bpf.LBLbConfig{Tap: uint32(f.buffer.Ifindex), Tunnel: uint32(f.tunnel), Vni: tunnel.VNI, Ended: f.ended, Reclaim: f.reclaim, Settle: f.startupUntil.Load()}
	if f.full.Load() {
		c.Full = 1
	}
	if f.onChange.Load() != nil {
		c.News = f.news.Load()
	}
	if err := f.maps.LbSetup.Put(uint32(0), c); err != nil {
		return fmt.Errorf("configuring the data path: %w", err)
	}
	return nil
}

// hasTCX is replaced by a test that wants the kernel to lack it.
var hasTCX = func() bool { return kernel.TCXLink.Check() == nil }

func (f *DataPath) attach(a kernel.TCX, prog *ebpf.Program) error {
	if !hasTCX() {
		c := attachment.Filter(a.Ifindex, a.Egress)
		f.filters = append(f.filters, c)
		return c.Attach(prog)
	}
	l, err := a.Attach(prog)
	if err != nil {
		return err
	}
	f.links[attachment.Link(a.Ifindex, a.Egress)] = l
	return nil
}

// Close ends the data path, unless it is pinned: packets go where the kernel's routes lead them.
func (f *DataPath) Close() {
	for _, l := range f.links {
		l.Close()
	}
	for _, c := range f.filters {
		if !f.stays {
			_ = f.ns.Do(func() error { return c.Detach(true) }) // its device may be gone
		}
	}
	if f.buffer != nil {
		f.buffer.Close()
	}
	if f.tunnel != 0 && !f.stays {
		_ = f.ns.Do(func() error { return netlink.LinkDel(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Index: f.tunnel}}) }) // may be gone
	}
	if f.coll != nil {
		f.coll.Close()
	}
	f.maps.Close()
	if f.ns != nil {
		f.ns.Close()
	}
}

// removeDevices takes away what stays of a load balancer that is not pinned any more.
func removeDevices(o Options) error {
	var errs []error
	for _, name := range []string{o.BufferDevice, o.Tunnel} {
		l, err := netlink.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) || name == o.Tunnel && o.TunnelMTU == 0 {
			continue
		}
		if err == nil {
			err = netlink.LinkDel(l)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// SetService has the data path know a service. Services of different protocols may have one number: where they go by source, a
// client keeps one backend for all of them.
func (f *DataPath) SetService(s Service) error {
	if s.ID < 0 || s.ID >= spec.MaxServices || s.Tag < 0 || s.Tag > peer.MaxTag {
		return fmt.Errorf("service %d: a load balancer has %d, from 0 on", s.ID, spec.MaxServices)
	}
	f.buffer.mu.Lock()
	f.buffer.services[listen{s.Listen, s.Proto}] = s
	f.buffer.mu.Unlock()
	if err := f.spread(s.ID); err != nil {
		return err
	}
	if err := f.route(s.Listen.Addr()); err != nil {
		return fmt.Errorf("service %s: the route for what this machine itself says to it: %w", s.Listen, err)
	}
	// Of fragments only the first has ports; the others are found by port 0.
	fragment := s
	fragment.Listen = netip.AddrPortFrom(s.Listen.Addr(), 0)
	for _, e := range []struct {
		s      Service
		broken bool
	}{{fragment, !f.fragmentsGo(s)}, {s, false}} {
		if err := f.putService(e.s, e.broken); err != nil {
			return fmt.Errorf("service %s: %w", s.Listen, err)
		}
	}
	return nil
}

func (f *DataPath) putService(s Service, broken bool) error {
	v := bpf.LBLbService{Id: uint32(s.Flows())}
	if s.BySource {
		v.BySource = 1
	}
	if broken {
		v.Broken = 1
	}
	return f.maps.LbServices.Put(bpf.LBLbServiceKey{Addr: s.Listen.Addr().As16(), Port: flow.Swap(s.Listen.Port()), Proto: s.Proto}, v)
}

// fragmentsGo says whether a fragment without ports, to a service's address, can only be for backends that its source alone finds.
func (f *DataPath) fragmentsGo(s Service) bool {
	f.buffer.mu.Lock()
	defer f.buffer.mu.Unlock()
	for _, o := range f.buffer.services {
		if o.Listen.Addr() == s.Listen.Addr() && o.Proto == s.Proto && (!o.BySource || o.ID != s.ID) {
			return false
		}
	}
	return true
}

// route has the kernel send what this machine says to a service's address, errors about backends' packets above all, to the device of
// buffered packets, where the data path takes it. Its MTU is that of tunnels: what the data path leaves to the kernel for being too
// big for them the kernel answers.
func (f *DataPath) route(a netip.Addr) error {
	bits := a.BitLen()
	r := &netlink.Route{LinkIndex: f.buffer.Ifindex, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}, Scope: netlink.SCOPE_LINK}
	if f.tunnelMTU > 0 {
		r.MTU, r.MTULock = f.tunnelMTU, true
	}
	return f.ns.Do(func() error { return netlink.RouteReplace(r) })
}

// flowKey is a client's flow of a service.
func (f *DataPath) flowKey(client netip.AddrPort, service int) Key {
	f.buffer.mu.Lock()
	defer f.buffer.mu.Unlock()
	for _, s := range f.buffer.services {
		if s.ID == spec.ServiceNumber(service) && s.BySource {
			return Key{Client: netip.AddrPortFrom(client.Addr(), 0), Service: service}
		}
	}
	return Key{Client: client, Service: service}
}

// serviceIDs are the numbers of the services that the data path knows.
func (f *DataPath) serviceIDs() (ids []int) {
	f.buffer.mu.Lock()
	defer f.buffer.mu.Unlock()
	for _, s := range f.buffer.services {
		if !slices.Contains(ids, s.ID) {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

// Counts reads them.
func (f *DataPath) Counts() (Counts, error) { return report.ReadCounts(f.maps.LbCounts) }
