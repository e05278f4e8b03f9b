// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/kernel"
)

// balancer returns the file of a load balancer that sends all new flows to the backend with number all.
func (w *world) balancer(all int, more string) string {
	cert, key, signers := w.ca.Files("lb")
	hosts := ""
	for _, s := range w.servers {
		weight := 0
		if s.number == all {
			weight = 1
		}
		hosts += fmt.Sprintf("  s%d: {number: %d, weight: %d}\n", s.number, s.number, weight)
	}
	return fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2, s3]
register: true
services:
  talk: {number: 3, listen: ["tcp %s"]}
backends:
%s%s`, cert, key, signers, w.at, hosts, more)
}

func (w *world) status() (lb.Status, error) {
	all, err := lb.Statuses(w.t.Context(), kernel.OpenRoot(w.root.Path()))
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("%d load balancers", len(all))
	}
	if err != nil {
		return lb.Status{}, err
	}
	return all[0], nil
}

// acquainted waits until all agents are connected to the load balancer, the keeper and each other.
func (w *world) acquainted() {
	w.t.Helper()
	w.eventually("the servers know each other", func() bool {
		for _, s := range w.servers {
			st := s.status()
			if !st.LB || !st.Keeper || len(st.Peers) != len(w.servers)-1 {
				return false
			}
			for _, there := range st.Peers {
				if !there {
					return false
				}
			}
		}
		return true
	})
}

func (w *world) mustSendAt(c *client, path ...int) {
	w.t.Helper()
	for _, to := range path {
		w.eventually(fmt.Sprint("a session goes to server ", to), func() bool {
			if w.servesAt(c) == to {
				return true
			}
			err := w.sendAt(c, to)
			return err != nil && !errors.Is(err, handoff.ErrNoPeer) && false
		})
		if err := c.ask("there"); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) settled() {
	w.t.Helper()
	w.eventually("no session is on its way", func() bool {
		for _, s := range w.servers {
			if st := s.status(); st.Sending+st.Receiving+st.Quarantined > 0 {
				return false
			}
		}
		return true
	})
}

// TestRebootedLB reboots the load balancer, with other weights. It must learn the owners of connections before it
// forwards their packets: of sessions moved once, repeatedly or never. No backend receives another's packets.
func TestRebootedLB(t *testing.T) {
	for name, at := range map[string]netip.AddrPort{"IPv4": at4, "IPv6": at6} {
		t.Run(name, func(t *testing.T) {
			w := newNetwork(t, 3, at)
			stopLB := w.play(w.middle, "lb", w.balancer(1, ""))
			var stops []func()
			for i, s := range w.servers {
				s.keep()
				stops = append(stops, w.playBackend(i, s))
				s.serve()
			}
			w.acquainted()
			var clients []*client
			for _, path := range [][]int{nil, {2}, {2, 1}, {2, 1, 2}, {2, 3}} {
				c := w.dialAt(at, 0)
				if err := c.ask("hello"); err != nil {
					t.Fatal(err)
				}
				w.mustSendAt(c, path...)
				clients = append(clients, c)
			}
			w.settled()
			for _, stop := range stops { // they return later than the data path
				stop()
			}
			stopLB()
			if err := lb.Remove(t.Context(), kernel.OpenRoot(w.root.Path()), w.middle, "lb"); err != nil {
				t.Fatal(err)
			}
			w.play(w.middle, "lb", w.balancer(3, fmt.Sprint("startup_timeout: ", longest)))
			answers := make(chan error, len(clients))
			for _, c := range clients {
				go func() { answers <- c.ask("still there") }()
			}
			w.eventually("packets wait", func() bool {
				st, err := w.status()
				return err == nil && st.Counts.Awaited >= uint64(len(clients))
			})
			for i, s := range w.servers {
				w.playBackend(i, s)
			}
			for range clients {
				if err := <-answers; err != nil {
					t.Error(err)
				}
			}
			w.eventually("packets wait no longer, and no server has spoken for another's session", func() bool {
				st, err := w.status()
				return err == nil && st.Counts.Mute == 0 && !st.Starting
			})
			for _, s := range w.servers {
				if st := s.status(); st.Quarantine.Strays > 0 {
					t.Errorf("server %d hears of sessions that have left it: %+v", s.number, st.Quarantine)
				}
			}
		})
	}
}

// TestIdleStaysKnown checks that a load balancer does not forget a silent connection still open at its backend.
func TestIdleStaysKnown(t *testing.T) {
	w := newNetwork(t, 3, at4)
	const idle = 400 * time.Millisecond
	w.play(w.middle, "lb", w.balancer(1, fmt.Sprintf("buffer_timeout: 100ms\nmove_timeout: 100ms\nidle_timeout: %s\n", idle)))
	for i, s := range w.servers {
		s.keep()
		w.playBackend(i, s)
		s.serve()
	}
	w.acquainted()
	c, rests := w.dialAt(at4, 0), w.dialAt(at4, 0)
	for _, c := range []*client{c, rests} {
		if err := c.ask("hello"); err != nil {
			t.Fatal(err)
		}
	}
	w.mustSendAt(c, 2)
	flow := func(c *client) (lb.Flow, error) {
		insts, err := lb.Instances(w.root)
		if err != nil || len(insts) != 1 {
			t.Fatal(insts, err)
		}
		v, err := lb.View(w.root, insts[0])
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		a := c.LocalAddr().String()
		return v.Flow(lb.Key{Client: netip.MustParseAddrPort(a), Service: 3})
	}
	w.settled()
	before, err := flow(c)
	if err != nil {
		t.Fatal(err)
	}
	w.eventually("it is silent for thrice as long as flows are known, and is known", func() bool {
		now, err := flow(c)
		if err != nil || now.In != before.In {
			t.Fatalf("%+v, %v", now, err)
		}
		if _, err := flow(rests); err != nil {
			t.Fatal(err)
		}
		return now.Seen > before.Seen+uint64(3*idle)
	})
	for _, c := range []*client{c, rests} {
		if err := c.ask("still there"); err != nil {
			t.Error(err)
		}
	}
	if st := w.servers[0].status(); st.Quarantine.Strays > 0 {
		t.Errorf("%+v: want no packet at the server that the session has left", st.Quarantine)
	}
}

// TestRebootInMove reboots the load balancer at each step of a move. The session continues at one backend.
func TestRebootInMove(t *testing.T) {
	for _, step := range []string{"load balancer: held", "load balancer: told held", "load balancer: flipped", "load balancer: told flipped"} {
		t.Run(strings.ReplaceAll(step, " ", "-"), func(t *testing.T) {
			t.Parallel()
			w := newNetwork(t, 2, at4)
			var dead atomic.Bool
			hit := make(chan struct{})
			w.lbStep = func(name string) {
				if name == step && dead.CompareAndSwap(false, true) {
					close(hit)
					runtime.Goexit() // as if the machine were lost
				}
			}
			w.run()
			c := w.dial()
			if err := c.ask("hello"); err != nil {
				t.Fatal(err)
			}
			w.ask(c, 2)
			<-hit
			w.reboot()
			if err := c.ask("still there"); err != nil {
				t.Fatal(err)
			}
			w.eventually("one server has the session", func() bool {
				n := 0
				for _, s := range w.servers {
					st, err := s.agent.Status()
					if err != nil || st.Sending+st.Receiving > 0 {
						return false
					}
					n += len(s.member.Member().Sessions())
				}
				return n == 1
			})
			if err := c.ask("and now"); err != nil {
				t.Error(err)
			}
		})
	}
}

// reboot restarts the load balancer without its state.
func (w *world) reboot() {
	w.t.Helper()
	devices := []string{"c"}
	for _, s := range w.servers {
		devices = append(devices, fmt.Sprint("s", s.number))
	}
	w.stopF()
	w.lb.Close()
	w.in(w.middle, func() (err error) {
		if w.lb, err = lb.New(lb.Options{Devices: devices, StartupTimeout: longest}); err != nil {
			return err
		}
		w.t.Cleanup(w.lb.Close)
		return errors.Join(w.lb.SetService(lb.Service{ID: 0, Listen: w.at, Proto: unix.IPPROTO_TCP}), w.lb.SetBackends(w.hosts))
	})
	w.startLB(w.hosts)
}
