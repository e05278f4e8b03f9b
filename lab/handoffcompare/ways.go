// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
)

// The ways to the servers, as metrics name them.
const (
	weirWay    = "weir"
	haproxyWay = "haproxy"
	directWay  = "direct"
)

var errNotInstalled = errors.New("it is not installed")

// addresses says which address the i-th connection goes to.
type addresses func(i int) netip.AddrPort

// way is one way to the servers.
type way struct {
	name string
	to   addresses
}

// ways makes those there are to n servers, and says how to end them.
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

func (w *world) startWeir(_ context.Context, n int) (func() error, error) {
	var f *lb.DataPath
	err := w.lbs[withWeir].Do(func() (err error) {
		devices := []string{"c0"}
		var hosts []lb.Backend
		for i, s := range w.servers[:n] {
			dev, err := net.InterfaceByName(towards(i))
			if err != nil {
				return err
			}
			devices = append(devices, towards(i))
			hosts = append(hosts, lb.Backend{Number: move.Backend(i + 1), Name: fmt.Sprint("server", i), Interface: dev.Index, MAC: s.mac, Weight: 1})
		}
		if f, err = lb.New(lb.Options{Devices: devices}); err != nil {
			return err
		}
		return errors.Join(f.SetBackends(hosts),
			f.SetService(lb.Service{Listen: netip.AddrPortFrom(serviceAddr, servicePort), Proto: unix.IPPROTO_TCP}))
	})
	if err != nil {
		if f != nil {
			f.Close()
		}
		return nil, err
	}
	return func() error {
		defer f.Close()
		c, err := f.Counts()
		w.dropped += c.Mute + c.NoBackend + c.NoReset + c.UnknownSource + c.Full
		return err
	}, nil
}

// startHAProxy has HAProxy take connections at the plain namespace's own address, and make others to the servers, in turn.
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
