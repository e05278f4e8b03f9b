// SPDX-License-Identifier: Apache-2.0

// Package explain explains the treatment of one packet by a load balancer. It reads the maps of the
// data path and follows lb.bpf.c.
package explain

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/ring"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Explainer follows one packet through one load balancer.
type Explainer struct {
	Name    string // of the load balancer
	Maps    bpf.LBMaps
	Pins    *kernel.Opened
	Netns   *netns.Handle
	Packet  feature.Packet
	Devices []string // including the tunnels' device
	Tunnel  string   // the tunnels' device; "": none
	Buffer  string   // the buffer device
	Known

	// At returns the link of lb_in at an interface, and its filter on kernels without tcx.
	At func(ifindex int) (link string, filter kernel.Clsact)
	// Flow reads a flow. ok is false for an unknown one. The client port is 0 for a service by
	// source.
	Flow func(client netip.AddrPort, service int) (f flow.Flow, ok bool, err error)
	// Bucket returns the bucket of a client's flow.
	Bucket func(client netip.AddrPort) int

	out []feature.Verdict
}

// Verdicts returns the verdicts about the packet.
func (x *Explainer) Verdicts() ([]feature.Verdict, error) {
	err := x.packet()
	return x.out, err
}

// packet follows lb_in and lb_own.
func (x *Explainer) packet() error {
	at, err := x.meets()
	if err != nil {
		return err
	}
	to, toService, err := x.service(x.Packet.To)
	if err != nil {
		return err
	}
	from, fromService, err := x.service(x.Packet.From)
	if err != nil {
		return err
	}
	address, routed, err := x.address()
	switch {
	case err != nil:
		return err
	case toService:
		return x.toService(at, to, routed)
	case fromService && at.attached:
		return x.fromService(at, from)
	case address:
		c := conclusion{text: fmt.Sprintf("%s is an address of its services, but none listens on %s port %d", x.Packet.To.Addr(), x.Packet.Proto, x.Packet.To.Port()), warning: true}
		if routed {
			c.result = fmt.Sprintf("dropped: load balancer %s has no service at %s %s", x.Name, x.Packet.Proto, x.Packet.To)
		}
		x.say(feature.StageForward, 0, c)
	case at.attached && x.tunnelled():
		x.say(feature.StageTC, at.order, conclusion{text: fromTunnel})
	}
	return nil
}

// fromTunnel is the check of lb_in on each packet from the tunnels' device.
const fromTunnel = "a packet from a tunnel passes if a backend sends it from a service's address; others are dropped"

// conclusion is the load balancer's decision about a packet.
type conclusion struct {
	text    string
	warning bool
	result  string // empty: the packet continues
}

func (x *Explainer) say(stage feature.Stage, order int32, c conclusion) {
	x.out = append(x.out, feature.Verdict{Stage: stage, Order: order, ExplainStep: feature.ExplainStep{Step: "load balancer " + x.Name, Text: c.text, Warning: c.warning}, Result: c.result})
}

// meeting is the load balancer's program at the packet's interface.
type meeting struct {
	index    int  // of the interface
	device   bool // the interface is one of the load balancer's
	attached bool
	order    int32 // position among the interface's programs
}

func (x *Explainer) tunnelled() bool { return x.Tunnel != "" && x.Packet.Interface == x.Tunnel }

// meets finds the program at the packet's interface.
func (x *Explainer) meets() (at meeting, err error) {
	if at.device = slices.Contains(x.Devices, x.Packet.Interface); !at.device {
		return at, nil
	}
	err = x.Netns.Do(func() error {
		i, err := net.InterfaceByName(x.Packet.Interface)
		if err != nil {
			return nil //nolint:nilerr // the interface has just been deleted
		}
		at.index = i.Index
		at.order, at.attached, err = x.attached(i)
		return err
	})
	return at, err
}

// attached reports whether the program is attached to an interface, and its position among the
// programs there. The caller is in the network namespace.
func (x *Explainer) attached(device *net.Interface) (order int32, ok bool, err error) {
	names, err := x.Pins.Links()
	if err != nil {
		return 0, false, err
	}
	link, filter := x.At(device.Index)
	if len(names) == 0 {
		id, err := filter.Program()
		return 1, id != 0, err
	}
	ln, err := x.Pins.Link(link)
	if errors.Is(err, kernel.ErrNotExist) {
		return 0, false, nil
	} else if err != nil {
		return 0, false, err
	}
	defer ln.Close()
	at, ok, err := kernel.PositionAt(kernel.TCX{Ifindex: device.Index, Device: device.Name}, ln)
	if errors.Is(err, kernel.ErrDetached) {
		return 0, false, nil
	}
	return int32(at.Number), ok, err
}

// service finds the service of an address and port.
func (x *Explainer) service(a netip.AddrPort) (s bpf.LBLbService, ok bool, err error) {
	k := bpf.LBLbServiceKey{Addr: a.Addr().As16(), Port: binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, a.Port())), Proto: x.Packet.Number()}
	switch err := x.Maps.LbServices.Lookup(k, &s); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return s, false, nil
	case err != nil:
		return s, false, fmt.Errorf("read service %s: %w", a, err)
	}
	return s, a.Port() != 0, nil
}

// address reports whether a packet's destination is an address of a service, at any port, and
// whether its route leads to the load balancer. It warns of a local address.
func (x *Explainer) address() (ours, routed bool, err error) {
	for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		var s bpf.LBLbService // the entry for fragments: see SetService
		err := x.Maps.LbServices.Lookup(bpf.LBLbServiceKey{Addr: x.Packet.To.Addr().As16(), Proto: proto}, &s)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, false, fmt.Errorf("read the services of %s: %w", x.Packet.To.Addr(), err)
		}
		ours = ours || err == nil
	}
	if !ours {
		return false, false, nil
	}
	local := false
	err = x.Netns.Do(func() error {
		all, err := netlink.RouteGet(x.Packet.To.Addr().AsSlice())
		if err != nil || len(all) == 0 {
			return nil //nolint:nilerr // no route
		}
		local = all[0].Type == unix.RTN_LOCAL
		l, err := net.InterfaceByIndex(all[0].LinkIndex)
		routed = err == nil && l.Name == x.Buffer
		return nil
	})
	to := x.Packet.To.Addr()
	switch {
	case local && to.Is4():
		x.say(feature.StageXDP, 0, conclusion{warning: true, text: fmt.Sprintf("%s is local on this host, so the kernel drops the answers of backends: remove the address, or run ip route del local %s", to, to)})
	case !routed:
		x.say(feature.StageXDP, 0, conclusion{warning: true, text: fmt.Sprintf("the route to %s does not lead to %s: weir serve restores it, unless another route has precedence (ip route get %s)", to, x.Buffer, to)})
	}
	return ours, routed, err
}

// toService explains a client's packet, at a device of the load balancer or routed to it.
func (x *Explainer) toService(at meeting, s bpf.LBLbService, routed bool) error {
	c, err := x.fromClient(s)
	if err != nil {
		return err
	}
	if at.attached {
		if x.tunnelled() {
			c.text += "; " + fromTunnel
		}
		x.say(feature.StageTC, at.order, c)
		return nil
	}
	if at.device {
		x.say(feature.StageTC, 0, conclusion{warning: true, text: fmt.Sprintf("its program is not attached to %s: %s", x.Packet.Interface, feature.DeviceRemedy)})
	}
	if c.text = x.Buffer + " is the load balancer's: " + c.text; !routed {
		c = conclusion{text: "the packet does not reach it", warning: true}
	}
	x.say(feature.StageForward, 0, c)
	return nil
}

// fromClient follows from_client in lb.bpf.c for a datagram or a SYN.
func (x *Explainer) fromClient(s bpf.LBLbService) (c conclusion, err error) {
	client := x.client(x.Packet.From, s)
	fl, known, err := x.Flow(client, int(s.Id))
	if err != nil {
		return c, err
	} else if !known {
		return x.newFlow(client, s)
	}
	leaves, why, err := x.leaves(fl, client, s)
	if err != nil {
		return c, err
	} else if leaves {
		c, err = x.newFlow(client, s)
		c.text += why
		return c, err
	}
	c.text = fmt.Sprintf("%s: the flow is known, and %s owns it", x.called(s), x.backendName(fl.Owner))
	switch {
	case fl.Pinned:
		c.text += " (weir lb override)"
	case fl.Ended:
		c.text += "; it has ended; a new connection between the same ends goes to the same backend"
	}
	c.text += why
	if fl.To != 0 {
		c.text += "; it moves to " + x.backendName(fl.To)
	}
	now := kernel.Monotonic()
	if fl.Buffered && now < fl.Until {
		wait := time.Duration(fl.Until - now).Round(time.Millisecond)
		c.result = fmt.Sprintf("buffered at %s for at most %s, then sent to the flow's backend", x.Buffer, wait)
		return c, nil
	} else if fl.Buffered {
		c.text += "; its buffering has timed out"
	}
	return x.toBackend(c, fl.Owner)
}

// client returns the client's end of a flow.
func (x *Explainer) client(a netip.AddrPort, s bpf.LBLbService) netip.AddrPort {
	if s.BySource != 0 {
		return netip.AddrPortFrom(a.Addr(), 0)
	}
	return a
}

// called returns the name of a service.
func (x *Explainer) called(s bpf.LBLbService) string { return x.serviceName(number(s)) }

func number(s bpf.LBLbService) int { return int(peer.ServiceNumber(uint16(s.Id))) }

// setup reads the data path's configuration.
func (x *Explainer) setup() (setup bpf.LBLbConfig, err error) {
	if err := x.Maps.LbSetup.Lookup(uint32(0), &setup); err != nil {
		return setup, fmt.Errorf("read the data path's configuration: %w", err)
	}
	return setup, nil
}

// newFlow explains a packet of an unknown flow.
func (x *Explainer) newFlow(client netip.AddrPort, s bpf.LBLbService) (c conclusion, err error) {
	setup, err := x.setup()
	if err != nil {
		return c, err
	}
	name := x.called(s)
	waits := x.Packet.Proto == "tcp" && kernel.Monotonic() < setup.Settle
	if waits && s.BySource != 0 {
		return conclusion{text: name + ": the load balancer is new, and its backends have not reported their sources yet", warning: true,
			result: "dropped, and the client repeats it: the load balancer waits for its backends' reports of their flows"}, nil
	}
	bucket, owner, err := x.bucket(client, s)
	if err != nil {
		return c, err
	}
	if owner == 0 {
		return conclusion{text: fmt.Sprintf("%s: the flow is new, and no backend gets new flows%s", name, x.noBackend()), warning: true, result: "dropped: no backend gets new flows of " + name}, nil
	}
	c.text = fmt.Sprintf("%s: the flow is new, and bucket %d of %d is %s's", name, bucket, ring.Buckets, x.backendName(owner))
	if waits {
		c.text += "; other packets of unknown connections are dropped until the backends have reported theirs"
	}
	return x.toBackend(c, owner)
}

// toBackend adds the path to a backend.
func (x *Explainer) toBackend(c conclusion, number move.Backend) (conclusion, error) {
	var b bpf.LBLbBackend
	if err := x.Maps.LbBackends.Lookup(uint32(number), &b); err != nil {
		return c, fmt.Errorf("read backend %d: %w", number, err)
	}
	if b.Ifindex == 0 {
		c.warning, c.result = true, fmt.Sprintf("dropped: the load balancer has no location of %s", x.backendName(number))
		return c, nil
	}
	way := "through the tunnel to " + netip.AddrFrom16(b.Tunnel).Unmap().String()
	if b.Tunnel == [16]uint8{} {
		way = "by " + x.device(int(b.Ifindex))
		c.text += fmt.Sprintf(", at %s of %s", net.HardwareAddr(b.Mac[:]), x.device(int(b.Ifindex)))
	}
	c.result = fmt.Sprintf("%s, %s", x.backendName(number), way)
	if reason := x.unwell(number); reason != "" {
		c.warning = true
		c.text += "; this backend is not well, but keeps its known flows: " + reason
	}
	return c, nil
}

// fromService explains an answer other than a reset, as from_backend in lb.bpf.c.
func (x *Explainer) fromService(at meeting, s bpf.LBLbService) error {
	senders, err := x.senders(at)
	if err != nil {
		return err
	}
	fl, known, err := x.Flow(x.client(x.Packet.To, s), int(s.Id))
	if err != nil {
		return err
	}
	c := conclusion{text: fmt.Sprintf("an answer of %s: ", x.called(s))}
	switch {
	case len(senders) == 0:
		c.warning, c.result = true, fmt.Sprintf("dropped: no backend of load balancer %s is at %s", x.Name, x.Packet.Interface)
		c.text += "no backend is at " + x.Packet.Interface
	case !known:
		c.text += "the flow is new, and the sending backend becomes its owner"
	case !slices.Contains(senders, fl.Owner):
		c.warning, c.result = true, fmt.Sprintf("dropped: the owner, %s, is not at %s", x.backendName(fl.Owner), x.Packet.Interface)
		c.text += fmt.Sprintf("the owner, %s, is not at %s", x.backendName(fl.Owner), x.Packet.Interface)
	default:
		c.text += fmt.Sprintf("it passes if %s sends it, because that backend owns the flow; from others it is dropped", x.backendName(fl.Owner))
	}
	x.say(feature.StageTC, at.order, c)
	x.say(feature.StageForward, 0, conclusion{text: "an answer of " + x.called(s), result: fmt.Sprintf("forwarded to the client, %s", x.Packet.To)})
	return nil
}

// senders returns the backends at an interface.
func (x *Explainer) senders(at meeting) (out []move.Backend, err error) {
	var number uint32
	if x.tunnelled() {
		var k bpf.LBLbTunnelKey
		it := x.Maps.LbTunnels.Iterate()
		for it.Next(&k, &number) {
			out = append(out, move.Backend(number))
		}
		return out, it.Err()
	}
	var k bpf.LBLbMacKey
	it := x.Maps.LbMacs.Iterate()
	for it.Next(&k, &number) {
		if int(k.Ifindex) == at.index {
			out = append(out, move.Backend(number))
		}
	}
	return out, it.Err()
}

// device returns an interface's name.
func (x *Explainer) device(index int) (name string) {
	name = fmt.Sprintf("deleted interface %d", index)
	_ = x.Netns.Do(func() error { // without an interface the default name stays
		if i, err := net.InterfaceByIndex(index); err == nil {
			name = i.Name
		}
		return nil
	})
	return name
}
