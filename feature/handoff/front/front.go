// SPDX-License-Identifier: Apache-2.0

// Package front is the data path of a front end: it spreads new flows of services over hosts, keeps each with its owner, and
// parks the packets of one that moves. Package move says who owns a flow and when; the agent that speaks with hosts is above.
//
//	f, err := front.New(front.Options{Devices: []string{"eth0", "eth1"}})   // in the namespace of the devices
//	err = f.SetService(front.Service{Listen: vip, Proto: unix.IPPROTO_TCP})
//	err = f.SetHosts(hosts)
//
// Hosts have the service's address themselves and are on a segment with the front end, which their replies pass: nothing of a
// packet is changed but its MAC addresses.
package front

import (
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// Options say where a front end is.
type Options struct {
	// Devices are all interfaces towards clients and hosts.
	Devices []string
	// Hold is the name of the device of parked packets, which is made; "weir-hold" if empty.
	Hold string
}

// Front is a data path. It ends with Close.
type Front struct {
	coll  *kernel.Collection
	maps  frontObjects
	links []kernel.Link
	hold  *hold
}

// New makes a front end in the network namespace of the calling thread. Needs Linux 6.6 (tcx).
func New(o Options) (_ *Front, err error) {
	if err := kernel.TCXLink.Check(); err != nil {
		return nil, err
	}
	if o.Hold == "" {
		o.Hold = "weir-hold"
	}
	f := &Front{}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if f.hold, err = newHold(o.Hold); err != nil {
		return nil, err
	}
	if err := f.load(); err != nil {
		return nil, err
	}
	for _, name := range o.Devices {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", name, err)
		}
		if err := f.attach(kernel.TCX{Ifindex: i.Index, Device: name}, f.maps.FrontIn); err != nil {
			return nil, err
		}
	}
	return f, f.attach(kernel.TCX{Ifindex: f.hold.ifindex, Device: o.Hold}, f.maps.FrontAgain)
}

func (f *Front) load() error {
	spec, err := loadFront()
	if err != nil {
		return err
	}
	if err := spec.Variables["front_tap_ifindex"].Set(uint32(f.hold.ifindex)); err != nil {
		return err
	}
	f.coll, err = kernel.Load(spec, []string{"front_in", "front_again", "front_change"}, nil)
	if err != nil {
		return err
	}
	return f.coll.Assign(&f.maps)
}

func (f *Front) attach(a kernel.Attachment, prog *ebpf.Program) error {
	l, err := a.Attach(prog)
	if err != nil {
		return err
	}
	f.links = append(f.links, l)
	return nil
}

// Close ends the data path: packets go where the kernel's routes lead them.
func (f *Front) Close() {
	for _, l := range f.links {
		l.Close()
	}
	if f.hold != nil {
		f.hold.close()
	}
	if f.coll != nil {
		f.coll.Close()
	}
	f.maps.Close()
}

// SetService has the data path know a service.
func (f *Front) SetService(s Service) error {
	if s.ID < 0 || s.ID >= maxServices {
		return fmt.Errorf("service %d: a front end has %d, from 0 on", s.ID, maxServices)
	}
	k := frontFrontServiceKey{Addr: s.Listen.Addr().As16(), Port: swap(s.Listen.Port()), Proto: s.Proto}
	v := frontFrontService{Id: uint32(s.ID)}
	if s.BySource {
		v.BySource = 1
	}
	f.hold.mu.Lock()
	f.hold.services[listen{s.Listen, s.Proto}] = s
	f.hold.mu.Unlock()
	if err := f.maps.FrontServices.Put(k, v); err != nil {
		return fmt.Errorf("service %s: %w", s.Listen, err)
	}
	return nil
}

// Counts are packets and flows since New, as front.h's enum has them.
type Counts struct {
	In, Out  uint64 // packets passed to hosts, and to clients
	Learned  uint64 // flows
	Held     uint64 // packets parked
	Mute     uint64 // packets of hosts that do not own the flow, dropped
	NoReset  uint64 // resets of flows that are about to move, dropped
	NoHost   uint64 // packets that there is no host for, dropped
	Full     uint64 // flows that there was no room for: they go by the hash
	ICMP     uint64 // errors passed to a flow's owner
	Stranger uint64 // packets of a service by who is none of its hosts, dropped
}

// Counts reads them.
func (f *Front) Counts() (Counts, error) {
	var c Counts
	for i, n := range []*uint64{&c.In, &c.Out, &c.Learned, &c.Held, &c.Mute, &c.NoReset, &c.NoHost, &c.Full, &c.ICMP, &c.Stranger} {
		var each []uint64
		if err := f.maps.FrontCounts.Lookup(uint32(i), &each); err != nil {
			return c, fmt.Errorf("reading counts: %w", err)
		}
		for _, v := range each {
			*n += v
		}
	}
	return c, nil
}

// now is CLOCK_MONOTONIC in ns.
func now() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0
	}
	return uint64(t.Nano())
}

var errHold = errors.New("the device of parked packets")
