// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/protect/neigh"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

type testLog struct{ t testing.TB }

func (l testLog) Info(msg string, a ...any) { l.t.Log(append([]any{msg}, a...)...) }
func (l testLog) Warn(msg string, a ...any) { l.t.Log(append([]any{"warning:", msg}, a...)...) }

// serve runs the part of weir serve under test until stop.
func (w *world) serve() (stop func()) { return w.serveTo(testLog{w.TB}) }

func (w *world) serveTo(log feature.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = Run(ctx, w.root, log)
	}()
	stop = func() { cancel(); <-ended }
	w.Cleanup(stop)
	return stop
}

// serveNow is serve, and waits until links are followed. An earlier event could be missed.
func (w *world) serveNow() (stop func()) {
	w.Helper()
	log := &heardLog{testLog: testLog{w.TB}}
	stop = w.serveTo(log)
	w.until("links are followed", func() bool { return log.count("links are followed") > 0 })
	return stop
}

// until waits for a condition, long enough for a busy machine.
func (w *world) until(what string, f func() bool) {
	w.Helper()
	nstest.Eventually(w, func() error {
		if !f() {
			return fmt.Errorf("not yet: %s; %+v", what, w.state("core"))
		}
		return nil
	})
}

// A link without a carrier is unusable at once. It is used again only after the hold time, and nothing is lost by the
// change.
func TestCarrier(t *testing.T) {
	w := newWorld(t)
	path := w.path(around())
	path.Hold = 600 * time.Millisecond
	w.apply(path)
	w.serve()
	p6, p4 := w.pair(true), w.pair(false)
	if !p6.arrives(10, patience) || !p4.arrives(10, patience) {
		t.Fatal("nothing arrives while all is well")
	}
	for range 2 {
		w.ip(w.r2, "link set main down")
		w.until("the carrier is lost", func() bool { return w.state("core").Carrier })
		for range 5 {
			if !p6.arrives(1000, patience) || !p4.arrives(1000, patience) {
				t.Error("a packet did not arrive while the link was down")
			}
		}
		begin := time.Now() // the hold time cannot begin earlier
		w.ip(w.r2, "link set main up")
		w.until("the link is up again", func() bool {
			if !p6.arrives(100, patience) {
				t.Error("a packet did not arrive while the link was coming back")
			}
			return !w.state("core").Carrier
		})
		if held := time.Since(begin); held < path.Hold {
			t.Errorf("the link was used after %s, before it was good for %s", held, path.Hold)
		}
		if !p6.arrives(10, patience) || !p4.arrives(10, patience) {
			t.Error("nothing arrives after the link has come back")
		}
	}
	// A drain takes effect at once, regardless of the hold time.
	w.drain(true)
	if st := w.state("core"); !st.Drain || !st.Down {
		t.Errorf("%+v", st)
	}
	w.drain(false)
	if st := w.state("core"); st.Down {
		t.Errorf("%+v", st)
	}
	w.healthy()
}

// While a link is down packets are rerouted at ingress, with the same hop limit and by the same routes. This ends
// with the process.
func TestFast(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	stop := w.serve()
	p := w.pair(true)
	before := p.hops(t)
	w.drain(true)
	w.until("packets are rerouted at ingress", func() bool { p.arrives(100, patience); return w.state("core").Counts.Fast > 0 })
	if got := p.hops(t); got != before {
		t.Errorf("hop limit %d, want %d as before", got, before)
	}
	for _, size := range []int{0, 1, 500, 1388} {
		if !p.arrives(size, patience) {
			t.Errorf("%d bytes do not arrive", size)
		}
	}
	p.discover(t, 2)
	w.until("the path's MTU is told", func() bool { _, _ = p.from.Write(make([]byte, 1450)); return p.mtu(t) == 1436 })
	// A longer route leads elsewhere, so the kernel routes its packets.
	fast := func() uint64 { return w.state("core").Counts.Fast }
	w.ip(w.r3, "route add fd00:d:0:0:7::/80 via fd00:32::2")
	w.ip(w.d, "addr add fd00:d:0:0:7::1/128 dev lo nodad")
	w.ip(w.r2, "route add fd00:d:0:0:7::/80 via fd00:d::2")
	w.ip(w.r1, "route add fd00:d:0:0:7::/80 via fd00:13::3")
	q := w.pairOf(w.s, addrS, "fd00:d:0:0:7::1")
	w.until("the new route is heard of", func() bool {
		n := w.state("core").Counts.Packets
		return q.arrives(10, patience) && w.state("core").Counts.Packets == n
	})
	nstest.Steadily(t, 100*time.Millisecond, func() error {
		n := w.state("core").Counts.Packets
		if !q.arrives(10, patience) {
			return errors.New("a packet to the longer prefix does not arrive")
		}
		if got := w.state("core").Counts.Packets; got != n {
			return errors.New("a packet of a route that leads elsewhere was rerouted")
		}
		return nil
	})
	w.until("the fast program is back after routes changed", func() bool { n := fast(); p.arrives(10, patience); return fast() > n })
	// A filter for forwarded packets must see every packet.
	stop()
	n := fast()
	if !p.arrives(10, patience) || fast() != n {
		t.Error("the fast program goes on without the process that knows the routes")
	}
	w.drain(false)
	if !p.arrives(10, patience) {
		t.Error("nothing arrives")
	}
	w.healthy()
}

// Configurations beyond a plain route lookup keep the fast program detached: packets take the kernel's way.
func TestFastKeepsAway(t *testing.T) {
	for name, prepare := range map[string]func(w *world){
		"a rule":   func(w *world) { w.ip(w.r1, "-6 rule add from fd00:a::99 lookup 77") },
		"its path": func(*world) {},
		"a chain": func(w *world) {
			if _, err := exec.LookPath("nft"); err != nil {
				w.Skip("need: tool nft (Debian package nftables)")
			}
			w.in(w.r1, func() error {
				return exec.Command("nft", "add table ip6 t; add chain ip6 t c { type filter hook forward priority 0; }").Run()
			})
		},
		"linkdown": func(w *world) { w.sysctls(w.r1, "net/ipv6/conf/main/ignore_routes_with_linkdown=1") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			prepare(w)
			path := w.path(around())
			path.Slow = name == "its path"
			w.apply(path)
			w.serve()
			w.drain(true)
			p := w.pair(true)
			sent := uint64(0)
			nstest.Steadily(t, 5*pollInterval, func() error {
				if !p.arrives(10, patience) {
					return errors.New("a packet does not arrive")
				}
				sent++
				if c := w.state("core").Counts; c.Fast != 0 || c.Packets != sent {
					return fmt.Errorf("of %d packets: %+v", sent, c)
				}
				return nil
			})
		})
	}
}

// A device deleted and created again under its name is protected again.
func TestDeviceReturns(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	w.serve()
	w.until("it is attached", func() bool { return w.state("core").Attached })
	for _, dev := range []string{"main", "back"} {
		w.ip(w.r1, "link del "+dev)
		w.until(dev+" is missed", func() bool { return len(w.state("core").Problems) > 0 })
		if dev == "main" {
			w.cable(w.r1, "main", w.r2, "main", "fd00:12::1/64 10.12.0.1/24", "fd00:12::2/64 10.12.0.2/24")
			w.ip(w.r1, "route add fc00:2::/32 via fd00:12::2", "route add fd00:d::/64 via fd00:12::2", "route add 10.4.0.0/24 via 10.12.0.2")
		} else {
			w.cable(w.r1, "back", w.r3, "r1", "fd00:13::1/64", "fd00:13::3/64")
			w.ip(w.r1, "route add fc00:3::/32 via fd00:13::3")
			w.ip(w.r3, "route add fc00:1::/32 via fd00:13::1", "route add fd00:a::/64 via fd00:13::1", "route add "+sidEnd+" encap seg6local action End dev r1")
		}
		w.until(dev+" is in use again", func() bool {
			st := w.state("core")
			// A repair by a deleted device has no name.
			return st.Attached && !st.Down && len(st.Repairs) == 1 && len(st.Problems) == 0 && !st.Repairs[0].Down && st.Repairs[0].Device == "back"
		})
		p := w.pair(true)
		if !p.arrives(10, patience) {
			t.Errorf("nothing arrives after %s came back", dev)
		}
		n := w.state("core").Counts.Packets
		w.drain(true)
		if !p.arrives(10, patience) || w.state("core").Counts.Packets == n {
			t.Errorf("not rerouted after %s came back: %+v", dev, w.state("core"))
		}
		w.drain(false)
	}
}

// Neighbours of the link and of the backup are kept while needed, including neighbours of later routes. Afterwards
// the kernel has them back. The operator's are never changed.
func TestNeighbours(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r2, "addr add fd00:12::22/64 dev main", "addr add fd00:12::23/64 dev main")
	_, rest, _ := strings.Cut(w.ip(w.r2, "link show main"), "link/ether")
	mac := strings.Fields(rest)[0]
	w.ip(w.r1, "neigh add fd00:12::23 lladdr "+mac+" dev main nud permanent", "route add fd00:e::/64 via fd00:12::23")
	w.apply(w.path(around()))
	w.serve()
	state := func(a string) string { return w.ip(w.r1, "-6 neigh show "+a) }
	for _, a := range []string{"fd00:12::2", "fd00:13::3"} {
		w.until(a+" is kept", func() bool { return strings.Contains(state(a), "PERMANENT") })
	}
	w.ip(w.r1, "route add fd00:f::/64 via fd00:12::22")
	w.until("the neighbour of a new route is kept", func() bool { return strings.Contains(state("fd00:12::22"), "PERMANENT") })
	w.ip(w.r1, "route del fd00:f::/64 via fd00:12::22")
	w.until("the neighbour of a route that went is given back", func() bool { return !strings.Contains(state("fd00:12::22"), "PERMANENT") })
	w.remove()
	for _, a := range []string{"fd00:12::2", "fd00:13::3"} {
		if s := state(a); strings.Contains(s, "PERMANENT") {
			t.Errorf("%s is still kept: %s", a, s)
		}
	}
	if !strings.Contains(state("fd00:12::23"), "PERMANENT") {
		t.Error("the operator's neighbour was taken away")
	}
}

// A neighbour silent at first is asked again, and kept once it answers.
func TestLateNeighbour(t *testing.T) {
	every := repeatEvery
	repeatEvery = 500 * time.Millisecond
	w := newWorld(t)
	t.Cleanup(func() { repeatEvery = every })
	w.ip(w.r1, "route add fd00:e::/64 via fd00:12::24") // no host has this address
	w.apply(w.path(around()))
	stop := w.serve()
	defer stop()
	time.Sleep(4 * neigh.ResolveTime) // apply and the watcher have asked it
	w.ip(w.r2, "addr add fd00:12::24/64 dev main nodad")
	w.until("the neighbour is kept", func() bool { return strings.Contains(w.ip(w.r1, "-6 neigh show fd00:12::24"), "PERMANENT") })
}

// A new device with the old index has lost the program and gets it again. So does another device renamed to the
// link's name.
func TestDeviceAnew(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	w.serve()
	w.until("it is attached", func() bool { return w.state("core").Attached })
	here, there := nstest.Ifindex(t, w.r1, "main"), nstest.Ifindex(t, w.r2, "main")
	w.ip(w.r1, "link del main")
	w.until("it is missed", func() bool { return len(w.state("core").Problems) > 0 })
	w.ip(w.r1, fmt.Sprintf("link add main index %d type veth peer name main index %d netns %s", here, there, netnsName(w.r2)), "link set main up")
	w.ip(w.r2, "link set main up", "addr add fd00:12::2/64 dev main nodad")
	w.ip(w.r1, "addr add fd00:12::1/64 dev main nodad", "route add fd00:d::/64 via fd00:12::2")
	again := func(what string) {
		t.Helper()
		w.until(what, func() bool {
			st := w.state("core")
			return st.Attached && !st.Down && len(st.Problems) == 0
		})
		p := w.pair(true)
		if !p.arrives(10, patience) {
			t.Errorf("nothing arrives after %s", what)
		}
		w.drain(true)
		w.until("it is rerouted after "+what, func() bool {
			n := w.state("core").Counts.Packets
			return p.arrives(10, time.Second) && w.state("core").Counts.Packets > n
		})
		w.drain(false)
	}
	again("the same number came again")
	// The other device is already known as the link of another path.
	w.cable(w.r1, "other", w.r2, "other", "fd00:14::1/64", "fd00:14::2/64")
	other := w.path(around())
	other.Name, other.Device = "other", "other"
	w.apply(w.path(around()), other)
	w.until("the other one is followed", func() bool { return w.state("other").Attached })
	w.ip(w.r1, "route replace fd00:d::/64 via fd00:14::2 dev other")
	time.Sleep(20 * quiet) // a change of routes triggers reconcile too
	for _, names := range [][2]string{{"main", "old"}, {"other", "main"}} {
		if w.tryIP(w.r1, "link set "+names[0]+" name "+names[1]) != nil { // before Linux 6.2 a device cannot be renamed while up
			w.ip(w.r1, "link set "+names[0]+" down", "link set "+names[0]+" name "+names[1], "link set "+names[1]+" up")
			w.ip(w.r1, "addr replace fd00:14::1/64 dev "+names[1]+" nodad", "route replace fd00:d::/64 via fd00:14::2 dev "+names[1])
		}
	}
	again("another device took the name")
}

// tryIP runs one command of iproute2.
func (w *world) tryIP(ns *netns.Handle, command string) error {
	return ns.Do(func() error { return exec.Command("ip", strings.Fields(command)...).Run() })
}
