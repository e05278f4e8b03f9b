// SPDX-License-Identifier: Apache-2.0

package handoffpair

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/topo"
)

var service = netip.MustParseAddrPort("192.0.2.1:7000")

// site is a network namespace.
type site struct {
	*netns.Handle
	name string
}

// world is a client, two load balancers and three hosts on two segments. The hosts' agents connect to a
// shared address of both load balancers. Routes select one of them, like VRRP or BGP.
type world struct {
	env      *lab.Env
	weir     string
	certs    rig.Certificates
	client   site
	wire     site // the segments
	lbs      [2]site
	hosts    [3]site
	agents   [2]*lab.Process
	on       int // the load balancer in the path
	here     int // number of hosts so far
	moved    int // flows not found by the hash, at the start of the second load balancer
	records  int // flows sent to it
	attempts int
}

var lbNames = [2]string{"lb-a", "lb-b"}

func newWorld(e *lab.Env) (*world, error) {
	weir, err := e.Weir()
	if err != nil {
		return nil, err
	}
	w := &world{env: e, weir: weir}
	if w.certs, err = rig.NewCertificates(e, "certificates"); err != nil {
		return nil, err
	}
	make := func(s *site, name string) {
		if err == nil {
			s.Handle, s.name, err = e.Namespace(name)
		}
	}
	make(&w.client, "client")
	make(&w.wire, "wire")
	for i := range w.lbs {
		make(&w.lbs[i], lbNames[i])
	}
	for i := range w.hosts {
		make(&w.hosts[i], fmt.Sprint("h", i+1))
	}
	if err != nil {
		return nil, err
	}
	return w, w.connect()
}

// connect connects all namespaces.
func (w *world) connect() error {
	errs := []error{w.segment("out"), w.segment("in"), w.plug("out", w.client, "up", "client", "10.1.0.100/16")}
	for i, f := range w.lbs {
		errs = append(errs, w.plug("out", f, "c", fmt.Sprint("out", i), fmt.Sprintf("10.1.0.%d/16", 11+i)), w.plug("in", f, "s", fmt.Sprint("in", i), fmt.Sprintf("10.2.0.%d/16", 11+i)),
			topo.Addresses(f.Handle, netip.MustParsePrefix("10.9.9.9/32")), topo.Sysctl(f.Handle, "net.ipv4.ip_forward", "1"), topo.Sysctl(f.Handle, "net.ipv4.conf.all.rp_filter", "0"))
	}
	for i, h := range w.hosts {
		errs = append(errs, w.plug("in", h, "up", fmt.Sprint("host", i), fmt.Sprintf("10.2.0.%d/16", 101+i)),
			topo.Addresses(h.Handle, netip.PrefixFrom(service.Addr(), 32)), topo.Sysctl(h.Handle, "net.ipv4.conf.all.rp_filter", "0"))
	}
	return errors.Join(errs...)
}

func (w *world) segment(name string) error {
	return w.wire.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		b := &netlink.Bridge{LinkAttrs: attrs}
		return errors.Join(netlink.LinkAdd(b), netlink.LinkSetUp(b))
	})
}

func (w *world) plug(segment string, at site, device, port, address string) error {
	if err := topo.Cable(topo.End{NS: at.Handle, Name: device, Addrs: []netip.Prefix{netip.MustParsePrefix(address)}}, topo.End{NS: w.wire.Handle, Name: port}); err != nil {
		return err
	}
	return w.wire.Do(func() error {
		b, err := netlink.LinkByName(segment)
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(l, b)
	})
}

// machine sets the ports of a load balancer up or down.
func (w *world) machine(i int, up bool) error {
	return w.wire.Do(func() error {
		for _, port := range []string{fmt.Sprint("out", i), fmt.Sprint("in", i)} {
			l, err := netlink.LinkByName(port)
			if err != nil {
				return err
			}
			set := netlink.LinkSetDown
			if up {
				set = netlink.LinkSetUp
			}
			if err := set(l); err != nil {
				return err
			}
		}
		return nil
	})
}

// by routes the paths through a load balancer.
func (w *world) by(i int) error {
	w.on = i
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	errs := []error{w.client.Do(func() error {
		return netlink.RouteReplace(&netlink.Route{Dst: all, Gw: net.IPv4(10, 1, 0, byte(11+i))})
	})}
	for _, h := range w.hosts {
		errs = append(errs, h.Do(func() error {
			return netlink.RouteReplace(&netlink.Route{Dst: all, Gw: net.IPv4(10, 2, 0, byte(11+i))})
		}))
	}
	return errors.Join(errs...)
}

// start starts weir serve of a feature, with a new file each time.
func (w *world) start(at site, name, only, text string) (*lab.Process, error) {
	w.attempts++
	return rig.Serve{Namespace: at.name, Name: fmt.Sprintf("%s-%d", name, w.attempts), Only: only, Text: text}.Start(w.env)
}

// add starts a load balancer, and waits until it is in operation.
func (w *world) add(i int) (err error) {
	w.agents[i], err = w.start(w.lbs[i], lbNames[i], "lb", fmt.Sprintf(`
lb:
  name: %s
  devices: [c, s]
  listen: 0.0.0.0:7946
  tls: %s
  register: true
  partner: {name: %s, address: 10.2.0.%d:7946}
  services:
    test: {number: 0, listen: [tcp %s]}
`, lbNames[i], w.certs.TLS(lbNames[i]), lbNames[1-i], 12-i, service))
	if err != nil {
		return err
	}
	if w.here == 0 {
		return nil // no host exists yet
	}
	return w.paired()
}

// paired waits until both load balancers have each other's flows, and counts them.
func (w *world) paired() error {
	return within("both load balancers to be paired", func() (bool, error) {
		a, err := w.status(w.on)
		if err != nil {
			return false, err
		}
		b, err := w.status(1 - w.on)
		if err != nil || a.Partner == nil || b.Partner == nil {
			return false, err
		}
		up := 0
		for _, h := range b.Backends {
			if h.Up && h.Where != "" {
				up++
			}
		}
		ok := a.Partner.Connected && b.Partner.Connected && !b.Starting && up == w.here && a.Partner.Told > 0
		if ok && w.records == 0 {
			w.moved, w.records = b.Flows, int(a.Partner.Told)
		}
		return ok, nil
	})
}

// kill kills a load balancer with its machine.
func (w *world) kill(i int) error {
	if err := w.machine(i, false); err != nil {
		return err
	}
	if err := w.agents[i].Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-w.agents[i].Done()
	out, err := exec.Command("nsenter", "--net=/run/netns/"+w.lbs[i].name, w.weir, "--root", w.env.Root, "lb", "remove", "--allow-outage", lbNames[i]).CombinedOutput()
	if err != nil {
		return fmt.Errorf("remove %s: %w: %s", lbNames[i], err, out)
	}
	return nil
}

// reboot brings the machine back.
func (w *world) reboot(i int) (err error) {
	if err := w.machine(i, true); err != nil {
		return err
	}
	before := w.here
	w.here = 0 // do not wait for it
	err = w.add(i)
	w.here = before
	return err
}

// host starts a host's server and its agent.
func (w *world) host(i int) error {
	// A separate process: this end of the connections uses enough descriptors for one.
	_, err := w.env.Start(lab.Command{Namespace: w.hosts[i].name, Path: w.env.Self(), Args: []string{hostArg, fmt.Sprint(i + 1)}, Output: os.Stderr})
	if err != nil {
		return err
	}
	name := fmt.Sprint("h", i+1)
	_, err = w.start(w.hosts[i], name, "backend", fmt.Sprintf(`
handoff:
  backend:
    name: %s
    number: %d
    address: 10.2.0.%d
    listen: 10.2.0.%d:7947
    lb: {address: 10.9.9.9:7946, names: [lb-a, lb-b]}
    tls: %s
    devices: [up]
    keeper: %s
`, name, i+1, 101+i, 101+i, w.certs.TLS(name), filepath.Join(w.env.Dir, "none")))
	if err != nil {
		return err
	}
	w.here++
	return within(name+" to register", func() (bool, error) {
		s, err := w.status(w.on)
		n := 0
		for _, h := range s.Backends {
			if h.Up && h.Connected && len(h.Unserved) == 0 {
				n++
			}
		}
		return n == w.here && !s.Starting, err
	})
}

func (w *world) status(i int) (s lb.Status, err error) {
	out, err := exec.Command(w.weir, "--root", w.env.Root, "lb", "status", "--json").Output()
	if err != nil {
		return s, err
	}
	var all []lb.Status
	if err := json.NewDecoder(bytes.NewReader(out)).Decode(&all); err != nil {
		return s, err
	}
	for _, s := range all {
		if s.Name == lbNames[i] && s.Agent {
			return s, nil
		}
	}
	return s, fmt.Errorf("%s does not answer", lbNames[i])
}

func within(what string, f func() (bool, error)) error {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		done, err := f()
		if done {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("timeout after %s, waiting for %s", patience, what), err)
		}
	}
}
