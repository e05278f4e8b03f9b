// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
)

// The ways to the servers, as metrics name them.
const (
	weirWay    = "weir"
	haproxyWay = "haproxy"
	directWay  = "direct"
)

var errNotInstalled = errors.New("it is not installed")

// addresses returns the destination of connection i.
type addresses func(i int) netip.AddrPort

// way is one way to the servers.
type way struct {
	name string
	to   addresses
}

// ways returns the available ways to n servers, and a function to end them.
func (w *world) ways(ctx context.Context, n int) ([]way, func() error, error) {
	ways := []way{{directWay, func(i int) netip.AddrPort { return netip.AddrPortFrom(serverAddr(without, i%n), servicePort) }}}
	var stops []func() error
	stop := func() error {
		var errs []error
		for _, s := range stops {
			errs = append(errs, s())
		}
		return errors.Join(errs...)
	}
	for _, of := range []struct {
		name  string
		at    netip.Addr
		start func(context.Context, int) (func() error, error)
	}{{weirWay, serviceAddr, w.startWeir}, {haproxyWay, middle(without), w.startHAProxy}} {
		s, err := of.start(ctx, n)
		if err != nil {
			return ways, stop, err
		}
		stops = append(stops, s)
		ways = append(ways, way{of.name, func(int) netip.AddrPort { return netip.AddrPortFrom(of.at, servicePort) }})
	}
	return ways, stop, nil
}

// startWeir makes weir serve run a load balancer for these servers, without agents.
func (w *world) startWeir(ctx context.Context, n int) (func() error, error) {
	devices, backends := "c0", ""
	for i := range n {
		devices += ", " + towards(i)
		backends += fmt.Sprintf("    server%d: {number: %d, address: %s}\n", i, i+1, serverAddr(withWeir, i))
	}
	proc, err := rig.Serve{Namespace: w.names[withWeir], Name: fmt.Sprint("lb-", n), Only: "lb", Text: fmt.Sprintf(`
lb:
  name: %s
  devices: [%s]
  listen: 0.0.0.0:7946
  tls: %s
  startup_timeout: 10ms
  services:
    compare: {number: 0, listen: [tcp %s:%d]}
  backends:
%s`, balancer, devices, w.tls, serviceAddr, servicePort, backends)}.Start(w.env)
	if err != nil {
		return nil, err
	}
	before, err := w.served(ctx, proc, n)
	stop := func() error {
		after, cerr := w.drops()
		w.dropped += after - before
		err := proc.Signal(syscall.SIGTERM)
		<-proc.Done()
		return errors.Join(cerr, err, w.removeLB(ctx))
	}
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// served waits until the load balancer reaches all servers, and returns the packets dropped by then.
func (w *world) served(ctx context.Context, proc *lab.Process, n int) (dropped uint64, err error) {
	root := kernel.OpenRoot(w.env.Root)
	answered := map[byte]bool{}
	for end := time.Now().Add(patience); len(answered) < n; time.Sleep(5 * time.Millisecond) {
		all, err := lb.Statuses(ctx, root)
		if len(all) == 1 && all[0].Agent && !all[0].Starting && !slices.ContainsFunc(all[0].Backends, func(b lb.BackendStatus) bool { return !b.Up || b.Where == "" }) {
			var server byte
			if server, err = w.askOne(); err == nil {
				answered[server] = true
			}
		}
		if time.Now().After(end) || ctx.Err() != nil || !proc.Running() {
			return 0, errors.Join(fmt.Errorf("the load balancer reaches %d of %d servers", len(answered), n), err, ctx.Err(), proc.Err())
		}
	}
	return w.drops()
}

// askOne returns the number of the server behind a new connection.
func (w *world) askOne() (server byte, err error) {
	fd, err := w.dial(netip.AddrPortFrom(serviceAddr, servicePort))
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	b := make([]byte, message)
	err = writeAll(fd, append([]byte{kindPing}, b...))
	if err == nil {
		err = readAll(fd, b)
	}
	return b[0], err
}

// drops returns the packets dropped by the load balancer, from its pins.
func (w *world) drops() (uint64, error) {
	f, err := lb.View(kernel.OpenRoot(w.env.Root), kernel.Instance{Scope: kernel.ScopeOf(w.lbs[withWeir]), Feature: "handoff", Name: "lb-" + balancer})
	if err != nil {
		return 0, err
	}
	defer f.Close()
	c, err := f.Counts()
	return c.Mute + c.NoBackend + c.NoReset + c.UnknownSource + c.Full, err
}

// removeLB ends the load balancer.
func (w *world) removeLB(ctx context.Context) error {
	weir, err := w.env.Weir()
	if err != nil {
		return err
	}
	p, err := w.env.Start(lab.Command{Namespace: w.names[withWeir], Path: weir, Args: []string{"--root", w.env.Root, "lb", "remove", "--allow-outage", balancer}, Output: os.Stderr})
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
		return p.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// startHAProxy makes HAProxy accept connections at the plain namespace's own address, and forward them to
// the servers in turn.
func (w *world) startHAProxy(ctx context.Context, n int) (func() error, error) {
	if _, err := lab.Find("haproxy"); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotInstalled, err)
	}
	p := peers.Proxy{Listen: netip.AddrPortFrom(middle(without), servicePort), Backlog: 1024, Spread: true}
	for i := range n {
		p.Backends = append(p.Backends, netip.AddrPortFrom(serverAddr(without, i), servicePort))
	}
	proc, err := p.Start(w.env, w.names[without])
	if err != nil {
		return nil, err
	}
	stop := func() error {
		if err := proc.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		<-proc.Done()
		return nil
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := w.dial(p.Listen)
		if err == nil {
			unix.Close(c)
			return stop, nil
		}
		if !proc.Running() || time.Now().After(deadline) || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("haproxy does not listen: %w", err), ctx.Err(), stop())
		}
	}
}
