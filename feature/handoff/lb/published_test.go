// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// open opens the scene's load balancer, perhaps again.
func (s *scene) open(t *testing.T, root *kernel.Root) {
	t.Helper()
	do(t, s.middle, func() (err error) {
		s.f, err = Open(t.Context(), root, "test", Options{Devices: s.devices, TunnelMTU: s.mtu})
		return err
	})
	if err := s.f.setServices([]Service{{ID: 0, Listen: service4, Proto: unix.IPPROTO_TCP}, {ID: 1, Listen: service6, Proto: unix.IPPROTO_TCP}}); err != nil {
		t.Fatal(err)
	}
}

// published returns a scene with a pinned load balancer.
func published(t *testing.T) (*scene, *kernel.Root) {
	t.Helper()
	return pinScene(t, newScene(t))
}

// pinScene pins the load balancer of a scene.
func pinScene(t *testing.T, sc *scene) (*scene, *kernel.Root) {
	t.Helper()
	hosts := sc.f.backends
	sc.f.Close()
	root := kernel.OpenRoot(nstest.BPFFS + "/lb-test")
	sc.open(t, root)
	t.Cleanup(func() {
		if sc.f != nil {
			sc.f.Close()
		}
		if err := Remove(context.Background(), root, sc.middle, "test"); err != nil {
			t.Error(err)
		}
	})
	if err := sc.f.SetBackends(hosts); err != nil {
		t.Fatal(err)
	}
	return sc, root
}

// TestOutlives checks that flows, owners and epochs survive the process, and the data path serves
// old and new flows meanwhile.
func TestOutlives(t *testing.T) {
	sc, root := published(t)
	c, k, owner, _ := session(t, sc)
	if _, err := sc.f.Change(k, func(fl *Flow) { fl.Epoch, fl.Incarnation = 7, 99 }); err != nil {
		t.Fatal(err)
	}
	sc.f.Close()
	if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
		t.Fatalf("%q, %v", got, err)
	}
	of := owners(t, sc, service4, 20)
	if of['1'] == 0 || of['2'] == 0 {
		t.Errorf("20 flows: %v", of)
	}
	insts, err := Instances(root)
	if err != nil || len(insts) != 1 || insts[0].Name != "lb-test" {
		t.Fatalf("%v, %v", insts, err)
	}
	v, err := View(root, insts[0])
	if err != nil {
		t.Fatal(err)
	}
	if fl, err := v.Flow(k); err != nil || fl.Owner != owner || fl.Epoch != 7 || fl.Incarnation != 99 {
		t.Errorf("%+v, %v", fl, err)
	}
	v.Close()
	sc.open(t, root)
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner || fl.Epoch != 7 || fl.Incarnation != 99 {
		t.Errorf("%+v, %v", fl, err)
	}
	// The predecessor's programs are gone with their links. Otherwise each packet would count
	// twice.
	came := sc.received(t)
	before, err := sc.f.Counts()
	if err != nil {
		t.Fatal(err)
	}
	const asks = 20
	for range asks {
		if _, err := ask(c, "c", patience); err != nil {
			t.Fatal(err)
		}
	}
	after, err := sc.f.Counts()
	if err != nil {
		t.Fatal(err)
	}
	// A veth updates its counters after the packet is processed, and on another CPU. The last
	// packet may be counted by the programs and not yet by the device. Double counts would never be
	// reached by the device's counter.
	n, all := after.In+after.Out-before.In-before.Out, uint64(0)
	nstest.Eventually(t, func() error {
		if all = sc.received(t) - came; n < 2*asks || n > all {
			return fmt.Errorf("%d packets came to the devices, and %d were counted", all, n)
		}
		return nil
	})
}

// received returns the number of packets received by the load balancer's devices.
func (s *scene) received(t *testing.T) (n uint64) {
	t.Helper()
	do(t, s.middle, func() error {
		for _, name := range s.devices {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			n += l.Attrs().Statistics.RxPackets
		}
		return nil
	})
	return n
}

// TestParkedOutlives checks that packets of a flow buffered at the agent's death wait at most until
// the deadline, with or without a new agent.
func TestParkedOutlives(t *testing.T) {
	sc, root := published(t)
	c, k, owner, other := session(t, sc)
	park := func(d time.Duration) {
		sc.f.bufferFor = d
		if _, err := sc.f.Change(k, func(fl *Flow) { fl.Buffering, fl.To = true, other }); err != nil {
			t.Fatal(err)
		}
		if err := sc.f.Buffer(k); err != nil {
			t.Fatal(err)
		}
		sc.f.Close()
	}
	// Long enough for a packet to arrive while it is buffered, even on a stalled machine.
	const parked = 4 * time.Second
	begin := time.Now()
	park(parked)
	if _, err := io.WriteString(c, "b"); err != nil {
		t.Fatal(err)
	}
	answers(t, c, "b")
	if d := time.Since(begin); d < parked-100*time.Millisecond {
		t.Errorf("packets waited for %s", d)
	}
	sc.open(t, root)
	if n, err := sc.f.Counts(); err != nil || n.Late == 0 || n.Buffered == 0 {
		t.Errorf("%+v, %v", n, err)
	}
	park(time.Minute)
	silent(t, c, "c")
	sc.open(t, root)
	a := newAgents(t, sc.f, 300*time.Millisecond)
	answers(t, c, "c")
	// A request of the source still succeeds, in the previous epoch.
	a.says(owner, k, move.Message{Kind: move.Reclaim, From: move.AtSource, To: move.AtLoadBalancer, Epoch: 1})
	if m := a.hears(owner); m.Kind != move.Reclaimed || !m.OK && m.Epoch != 2 {
		t.Errorf("%+v", m)
	}
	if got, err := ask(c, "d", patience); err != nil || got[0] != byte('0'+owner) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestLifeOutlives checks that the next agent of the load balancer knows the incarnation of a
// flow's new owner. The source gets the flow back only if that host's agent has died.
func TestLifeOutlives(t *testing.T) {
	for name, died := range map[string]bool{"lives": false, "died": true} {
		t.Run(name, func(t *testing.T) {
			sc, root := published(t)
			_, k, owner, other := session(t, sc)
			t.Run("before", func(t *testing.T) {
				a := newAgents(t, sc.f, patience)
				a.says(owner, k, asksHold(1, other))
				a.hears(owner)
				a.says(other, k, move.Message{Kind: move.Flip, From: move.AtDestination, To: move.AtLoadBalancer, Epoch: 1})
				if m := a.hears(other); !m.OK {
					t.Fatalf("%+v", m)
				}
			})
			fl, err := sc.f.Flow(k)
			if err != nil || fl.Incarnation == 0 || fl.Owner != other {
				t.Fatalf("%+v, %v", fl, err)
			}
			sc.f.Close()
			sc.open(t, root)
			t.Run("after", func(t *testing.T) {
				var lives [3]uint64
				if !died {
					lives[other] = fl.Incarnation
				}
				a := agentsOf(t, sc.f, patience, lives)
				if !died { // its first message on the new connection
					a.says(other, k, move.Message{Kind: move.Flip, From: move.AtDestination, To: move.AtLoadBalancer, Epoch: 1})
					a.hears(other)
				}
				a.says(owner, k, move.Message{Kind: move.Reclaim, From: move.AtSource, To: move.AtLoadBalancer, Epoch: 1})
				if m := a.hears(owner); m.Kind != move.Reclaimed || m.OK != died {
					t.Errorf("%+v", m)
				}
			})
		})
	}
}

// TestRemove checks that setServices removes other services, and Remove leaves nothing.
func TestRemove(t *testing.T) {
	sc, root := published(t)
	if err := sc.f.setServices([]Service{{ID: 0, Listen: service4, Proto: unix.IPPROTO_TCP}}); err != nil {
		t.Fatal(err)
	}
	n := 0
	var sk bpf.LBLbServiceKey
	var sv bpf.LBLbService
	for it := sc.f.maps.LbServices.Iterate(); it.Next(&sk, &sv); n++ {
		if netip.AddrFrom16(sk.Addr).Unmap() != service4.Addr() {
			t.Errorf("%+v", sk)
		}
	}
	if n != 2 {
		t.Errorf("%d entries: want the port's and the fragments'", n)
	}
	sc.f.Close()
	if err := Remove(t.Context(), root, sc.middle, "test"); err != nil {
		t.Fatal(err)
	}
	if left, err := Instances(root); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
	do(t, sc.middle, func() error {
		if _, err := net.InterfaceByName("weir-lb-buffer"); err == nil {
			t.Error("the device of buffered packets is left")
		}
		return nil
	})
	sc.open(t, root)
}

// TestClsact checks the same with device filters on kernels without tcx: they survive the process,
// are replaced, and are deleted by Remove.
func TestClsact(t *testing.T) {
	was := hasTCX
	hasTCX = func() bool { return false }
	defer func() { hasTCX = was }()
	sc, root := published(t)
	c, k, owner, _ := session(t, sc)
	sc.f.Close()
	if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
		t.Fatalf("%q, %v", got, err)
	}
	sc.open(t, root)
	if err := sc.f.Buffer(k); err != nil {
		t.Fatal(err)
	}
	silent(t, c, "c")
	if n, err := sc.f.Flush(k); err != nil || n == 0 {
		t.Errorf("%d waited, %v", n, err)
	}
	answers(t, c, "c")
	sc.f.Close()
	l, err := root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = removeAll(l)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	do(t, sc.middle, func() error {
		there, err := kernel.Clsact{Ifindex: nstest.Ifindex(t, sc.middle, "c")}.HasQdisc()
		if err != nil || there {
			t.Errorf("a qdisc is left: %t, %v", there, err)
		}
		return nil
	})
	sc.open(t, root) // for the end of the test
}
