// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// arrives reports whether a datagram from one namespace reaches a socket of another.
func arrives(t *testing.T, from *netns.Handle, source netip.Addr, to *net.UDPConn) bool {
	t.Helper()
	sent := false
	err := from.Do(func() error {
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), to.LocalAddr().(*net.UDPAddr))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("x"))
		sent = err == nil
		return nil
	})
	if err != nil || !sent {
		return false // no route
	}
	_ = to.SetReadDeadline(time.Now().Add(time.Second))
	_, err = to.Read(make([]byte, 8))
	return err == nil
}

// gauge sums a metric's values with a label value.
func gauge(t *testing.T, w *world, name, label string) (sum float64) {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(Feature{}.Collector(w.root))
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && slices.ContainsFunc(m.GetLabel(), func(p *dto.LabelPair) bool { return p.GetValue() == label }) {
				sum += m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// A pulled cable under stock FRR removes zebra's routes at once. Packets are rerouted until isisd has other routes.
// Routes withdrawn while the link works have no copy.
func TestKeepsRoutesOfFRR(t *testing.T) {
	frrtest.Need(t, "isisd")
	w := newWorld(t) // for its root and needs
	n := frrtest.NewNet(t, "a", "b", "c")
	n.OnlyISIS, n.NoLabels = true, true
	p := func(name string) frrtest.Port { return frrtest.Port{Name: name, Metric: 10} }
	n.Cable("a", p("b0"), "b", p("a0"))
	n.Cable("a", p("c0"), "c", p("a0"))
	n.Cable("b", p("c0"), "c", p("b0"))
	routers := n.Start()
	a, b := routers[0], routers[1]
	w.r1, w.r2 = a.NS, b.NS
	routed := func(over string) bool {
		out := ""
		w.in(a.NS, func() error {
			text, _ := exec.Command("ip", "-6", "route", "show", frrtest.Loopback(1).String()+"/128").CombinedOutput()
			out = string(text)
			return nil
		})
		return strings.Contains(out, "proto isis") && strings.Contains(out, "dev "+over)
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		nstest.Within(t, 3*time.Minute, func() error {
			if !f() {
				return fmt.Errorf("not yet: %s; %+v", what, w.state().Paths)
			}
			return nil
		})
	}
	eventually("isisd has a route to b", func() bool { return routed("b0") })
	name := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), a.NS.FD())
	w.apply(fmt.Sprintf("reroute:\n  - {name: ab, netns: %s, interface: b0, repairs: [{interface: c0, via: 'fd00:2::2'}, {interface: c0, via: 10.77.2.2}]}\n", name))
	var log nstest.Log
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(&log, nil))) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		t.Log(log.String())
	}()
	eventually("zebra's routes are followed", func() bool {
		st := w.state().Paths[0]
		return st.Routes.Followed && st.Routes.Kept > 0 && st.Routes.Kept == st.Routes.Carrier
	})
	to := nstest.ListenUDP(t, b.NS, netip.AddrPortFrom(frrtest.Loopback(1), 0))
	if !arrives(t, a.NS, frrtest.Loopback(0), to) {
		t.Fatal("nothing arrives before")
	}
	a.Signal("isisd", syscall.SIGSTOP) // delays isisd's new routes, so packets are sent without any route
	w.ip(b.NS, "link set a0 down")
	eventually("the copies are used", func() bool { r := w.state().Paths[0].Routes; return r.InUse && r.Lost > 0 })
	if routed("b0") || routed("c0") {
		t.Fatal("isisd has a route still")
	}
	eventually("packets arrive without a route", func() bool { return arrives(t, a.NS, frrtest.Loopback(0), to) })
	eventually("the log says so", func() bool { return log.Has("routes lost with their link", "interface=b0", "protocol=isis") })
	if got := gauge(t, w, "weir_reroute_routes", "lost"); got == 0 {
		t.Error("the metric knows no lost route")
	}
	a.Signal("isisd", syscall.SIGCONT)
	eventually("isisd has a new route", func() bool { return routed("c0") })
	eventually("the copies are not used any more", func() bool { return !w.state().Paths[0].Routes.InUse })
	if !arrives(t, a.NS, frrtest.Loopback(0), to) {
		t.Error("nothing arrives by the new route")
	}
}
