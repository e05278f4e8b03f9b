// SPDX-License-Identifier: Apache-2.0

// Package lb is a load balancer: a data path in BPF, and an agent. The data path spreads new flows of services over backends,
// keeps each flow at its owner, and buffers packets of moving flows. Package move decides about the owner of a flow. The agent
// talks to the backends' agents.
//
//	f, err := lb.New(lb.Options{Devices: []string{"eth0", "eth1"}})   // in the network namespace of the devices
//	err = f.SetService(lb.Service{Listen: vip, Proto: unix.IPPROTO_TCP})
//	err = f.SetBackends(backends)
//
// Each backend has the service's address itself, and its replies pass the load balancer. The data path changes only MAC
// addresses. A backend on the load balancer's segment gets packets directly. Other backends get them through a tunnel (package
// tunnel).
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
	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/lb/report"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Options are the devices of a load balancer.
type Options struct {
	// Devices are all interfaces towards clients and backends.
	Devices []string
	// BufferDevice is the name of the device for buffered packets. It is created. Default "weir-lb-buffer".
	BufferDevice string
	// TunnelMTU is the MTU of packets into tunnels: the least MTU of [locate.Location]. 0 means no tunnels. A longer packet is
	// answered by a Packet Too Big, or fragmented if its sender allows it.
	TunnelMTU int
	// TunnelRootPorts drops packets to tunnels from source ports open to every user of a backend's host (1024 and above).
	TunnelRootPorts bool `json:",omitempty"`
	// Tunnel is the name of the tunnels' device. It is created. Default [tunnel.Device].
	Tunnel string
	// StartupTimeout bounds the startup of a new data path. It drops packets of unknown connections until the backends' agents
	// have reported their sessions. Clients repeat these packets.
	StartupTimeout time.Duration `json:"-"`
}

// DataPath is the BPF data path of a load balancer. Close releases it.
type DataPath struct {
	coll         *kernel.Collection
	maps         bpf.LBObjects
	links        map[string]kernel.Link    // by pin name
	stays        bool                      // pinned: Close leaves it running
	devices      map[string]int            // interface index by name, 0 for an absent one
	filters      []kernel.Clsact           // in place of links, before Linux 6.6
	onChange     atomic.Pointer[func(Key)] // called with each flow changed by the agent; nil: no partner
	full         atomic.Bool               // no further sources are learned
	news         atomic.Uint32             // learned flows to report to onChange: lb_config.news
	buffer       *bufferDevice
	ns           *netns.Handle
	tunnel       int // interface index, or 0
	tunnelMTU    int
	bufferFor    time.Duration
	ended        uint32        // lb_config.ended
	reclaim      uint16        // lb_config.reclaim
	crowded      atomic.Bool   // too many doubtful flows, see doubtful
	unasked      atomic.Bool   // too many unconfirmed flows, known by backends' packets alone
	startupUntil atomic.Uint64 // CLOCK_MONOTONIC in ns: end of StartupTimeout
	mu           sync.Mutex
	backends     []Backend             // nil before SetBackends
	vacant       map[move.Backend]bool // dropped by SetBackends, and not yet by removeBackend
	names        *names.Names
}

// New creates a data path in the network namespace of the calling thread. It ends with Close or with this process. [Open] creates
// a persistent one. New needs Linux 5.12. Before 6.6 (tcx) the programs stay attached after SIGKILL.
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

// devices returns the devices of lb_in: all interfaces, and the tunnels' device.
func (o Options) devices() []string {
	if o.TunnelMTU > 0 {
		return append(slices.Clone(o.Devices), o.Tunnel)
	}
	return o.Devices
}

// build creates the devices, loads the programs and attaches them. The programs reuse the maps in share.
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
	if err := f.openNames(share); err != nil {
		return err
	}
	if err := f.maps.LbUsers.Put(uint32(0), uint64(oneIf(o.TunnelRootPorts))); err != nil {
		return fmt.Errorf("configure source ports of tunnels: %w", err)
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
		return fmt.Errorf("read the data path's configuration: %w", err)
	}
	f.startupUntil.CompareAndSwap(0, before.Settle)
	f.ended, f.reclaim = before.Ended, before.Reclaim
	f.full.Store(before.Full != 0)
	return errors.Join(f.beginRoom(), f.configure())
}

// configure writes lb_config.
func (f *DataPath) configure() error {
	c := bpf.LBLbConfig{Tap: uint32(f.buffer.Ifindex), Tunnel: uint32(f.tunnel), Vni: tunnel.VNI, Ended: f.ended, Reclaim: f.reclaim, Settle: f.startupUntil.Load()}
	if f.full.Load() {
		c.Full = 1
	}
	if f.onChange.Load() != nil {
		c.News = f.news.Load()
	}
	if err := f.maps.LbSetup.Put(uint32(0), c); err != nil {
		return fmt.Errorf("configure the data path: %w", err)
	}
	return nil
}

// hasTCX is replaced by tests of kernels without tcx.
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

// Close detaches the programs and removes the devices, unless the data path is pinned. Packets then follow the kernel's routes.
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
	if f.names != nil {
		f.names.Close()
	}
	if f.ns != nil {
		f.ns.Close()
	}
}

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

// SetService adds or changes a service. Services of different protocols may share a number. With BySource a client then keeps one
// backend for all of them.
func (f *DataPath) SetService(s Service) error {
	if s.ID < 0 || s.ID >= spec.MaxServices || s.Tag < 0 || s.Tag > peer.MaxTag {
		return fmt.Errorf("service %d: a load balancer has %d services, numbered from 0", s.ID, spec.MaxServices)
	}
	f.buffer.mu.Lock()
	f.buffer.services[listen{s.Listen, s.Proto}] = s
	f.buffer.mu.Unlock()
	if err := f.spread(s.ID); err != nil {
		return err
	}
	if err := f.route(s.Listen.Addr()); err != nil {
		return fmt.Errorf("service %s: add the route for this machine's own packets: %w", s.Listen, err)
	}
	// Only the first fragment of a packet has ports. The others are looked up with port 0.
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

// fragmentsGo reports whether the source address alone selects the backend of a fragment without ports. This holds if all
// services at the address go by source with one number.
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

// route makes the kernel send packets from this machine to a service's address out of the buffer device, into the data path. Most
// of these are ICMP errors about backends' packets. The route has the tunnels' MTU, so the kernel itself answers packets too big
// for a tunnel.
func (f *DataPath) route(a netip.Addr) error {
	bits := a.BitLen()
	r := &netlink.Route{LinkIndex: f.buffer.Ifindex, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}, Scope: netlink.SCOPE_LINK}
	if f.tunnelMTU > 0 {
		r.MTU, r.MTULock = f.tunnelMTU, true
	}
	return f.ns.Do(func() error { return netlink.RouteReplace(r) })
}

// flowKey returns the key of a client's flow to a service.
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

// Counts reads the packet counters.
func (f *DataPath) Counts() (Counts, error) { return report.ReadCounts(f.maps.LbCounts) }
