// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// pairOfLBs are two load balancers between a client and two hosts. Routes use one or the other.
type pairOfLBs struct {
	t      *testing.T
	client *netns.Handle
	hosts  [2]*netns.Handle
	lbs    [2]*DataPath
	agents [2]*Agent
	ends   [2]func() // stop the agents
	ca     *peertest.Authority
	listen [2]string
	// openFor is how long moves of the partner stay open; 0: the default.
	openFor time.Duration
}

var (
	lbNames  = [2]string{"lb-a", "lb-b"}
	clientLo = netip.MustParseAddr("10.8.0.1")
)

// newPairOfLBs creates two load balancers. Load balancer i has hosts with weights[i].
func newPairOfLBs(t *testing.T, weights [2][2]int) *pairOfLBs {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	p := &pairOfLBs{t: t, client: nstest.NewNetns(t), ca: peertest.NewAuthority(t)}
	nstest.Address(t, p.client, "lo", netip.PrefixFrom(clientLo, 32))
	for h := range p.hosts {
		p.hosts[h] = nstest.NewNetns(t)
		nstest.Address(t, p.hosts[h], "lo", netip.PrefixFrom(service4.Addr(), 32))
		looseSource(t, p.hosts[h])
	}
	for i := range p.lbs {
		ns := nstest.NewNetns(t)
		nstest.Cable(t, p.client, fmt.Sprint("w", i), ns, "c")
		nstest.Address(t, p.client, fmt.Sprint("w", i), prefix("10.1.%d.2/24", i))
		nstest.Address(t, ns, "c", prefix("10.1.%d.1/24", i))
		route(t, ns, "c", "10.8.0.1/32", fmt.Sprintf("10.1.%d.2", i))
		forward(t, ns)
		looseSource(t, ns)
		devices, hosts := []string{"c"}, []Backend(nil)
		for h, host := range p.hosts {
			name := fmt.Sprint("h", h+1)
			nstest.Cable(t, host, fmt.Sprint("w", i), ns, name)
			nstest.Address(t, host, fmt.Sprint("w", i), prefix("10.2.1%d%d.2/24", i, h))
			nstest.Address(t, ns, name, prefix("10.2.1%d%d.1/24", i, h))
			devices = append(devices, name)
			hosts = append(hosts, Backend{Number: move.Backend(h + 1), Name: name, Interface: nstest.Ifindex(t, ns, name), MAC: macOf(t, host, fmt.Sprint("w", i)), Weight: weights[i][h]})
		}
		do(t, ns, func() (err error) {
			if p.lbs[i], err = New(Options{Devices: devices}); err != nil {
				return err
			}
			t.Cleanup(p.lbs[i].Close)
			return errors.Join(p.lbs[i].SetBackends(hosts), p.lbs[i].SetService(Service{ID: 0, Listen: service4, Proto: unix.IPPROTO_TCP}))
		})
	}
	serve(t, p.hosts, service4)
	for i := range p.listen { // the agents connect over another network
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p.listen[i] = l.Addr().String()
		l.Close()
	}
	p.by(0)
	return p
}

func looseSource(t *testing.T, ns *netns.Handle) {
	t.Helper()
	do(t, ns, func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/all/rp_filter", []byte("0"), 0) })
}

func macOf(t *testing.T, ns *netns.Handle, device string) (mac net.HardwareAddr) {
	t.Helper()
	do(t, ns, func() error {
		i, err := net.InterfaceByName(device)
		if err == nil {
			mac = i.HardwareAddr
		}
		return err
	})
	return mac
}

// by routes both directions through a load balancer.
func (p *pairOfLBs) by(lb int) {
	p.t.Helper()
	replace := func(ns *netns.Handle, to netip.Addr, via string, src net.IP) {
		do(p.t, ns, func() error {
			return netlink.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(32, 32)}, Gw: net.ParseIP(via), Src: src})
		})
	}
	replace(p.client, service4.Addr(), fmt.Sprintf("10.1.%d.1", lb), clientLo.AsSlice())
	for h, ns := range p.hosts {
		replace(ns, clientLo, fmt.Sprintf("10.2.1%d%d.1", lb, h), nil)
	}
}

func (p *pairOfLBs) start(i int) {
	p.t.Helper()
	var err error
	p.agents[i], err = NewAgent(p.lbs[i], AgentOptions{Name: lbNames[i], TLS: p.ca.TLS(lbNames[i]), EndedTimeout: 50 * time.Millisecond,
		MoveTimeout: 700 * time.Millisecond, Partner: Partner{Name: lbNames[1-i], Address: p.listen[1-i]},
		Backends: []Backend{{Number: 1, Name: "h1"}, {Number: 2, Name: "h2"}}})
	if err != nil {
		p.t.Fatal(err)
	}
	p.agents[i].openFor = cmp.Or(p.openFor, p.agents[i].openFor)
	l, err := net.Listen("tcp", p.listen[i])
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(p.t.Context())
	done := make(chan error, 1)
	go func() { done <- p.agents[i].Serve(ctx, l) }()
	p.ends[i] = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Error(err)
		}
	})
	p.t.Cleanup(p.ends[i])
}

// knows waits for a state of a flow at a load balancer.
func (p *pairOfLBs) knows(lb int, k Key, want func(Flow, error) bool) {
	p.t.Helper()
	nstest.Eventually(p.t, func() error {
		fl, err := p.lbs[lb].Flow(k)
		if want(fl, err) {
			return nil
		}
		return fmt.Errorf("%s: %+v, %v", lbNames[lb], fl, err)
	})
}

// TestPartner checks that a flow keeps its host when its path changes to the other load balancer,
// in spite of other weights there. Changes at one are known to the other.
func TestPartner(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	p.openFor = 700 * time.Millisecond
	p.start(0)
	old := dial(t, p.client, service4) // before the partner starts
	if got, err := ask(old, "a", patience); err != nil || got[0] != '1' {
		t.Fatalf("%q, %v", got, err)
	}
	p.start(1)
	c := dial(t, p.client, service4)
	if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
		t.Fatalf("%q, %v", got, err)
	}
	for _, k := range []Key{keyOfConn(old, 0), keyOfConn(c, 0)} {
		p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	}
	p.by(1)
	for _, conn := range []net.Conn{old, c} {
		if got, err := ask(conn, "b", patience); err != nil || got[0] != '1' {
			t.Fatalf("by the other load balancer: %q, %v", got, err)
		}
	}
	if got, err := ask(dial(t, p.client, service4), "a", patience); err != nil || got[0] != '2' {
		t.Errorf("a new one: %q, %v", got, err)
	}
	k, start := keyOfConn(c, 0), time.Now()
	// It is about to move. Both drop its backend's resets, and the move ends without further
	// reports.
	for heard := false; !heard; { // on a stalled machine the move may end before the first check
		if _, err := p.lbs[0].Change(k, func(fl *Flow) { fl.To = 2 }); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		p.knows(1, k, func(fl Flow, err error) bool {
			heard = err == nil && fl.To == 2
			return heard || time.Since(begin) > patience/10
		})
		if time.Since(start) > patience {
			t.Fatal("the other load balancer does not hear of the move")
		}
	}
	p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.To == 0 && fl.Owner == 1 && fl.Epoch == 0 })
	if _, err := p.lbs[0].Change(k, func(fl *Flow) { fl.Flow = move.Flow{Owner: 2, Predecessor: 1, Epoch: 1} }); err != nil {
		t.Fatal(err)
	}
	p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 2 && fl.Epoch == 1 })
	// It moves back, and a late report changes nothing.
	if _, err := p.lbs[1].Change(k, func(fl *Flow) { fl.Flow = move.Flow{Owner: 1, Epoch: 2} }); err != nil {
		t.Fatal(err)
	}
	p.knows(0, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 && fl.Epoch == 2 })
	late := peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Owner: 2, Epoch: 1}
	if err := p.agents[0].adopt(late); err != nil {
		t.Error(err)
	}
	if got, err := ask(c, "c", patience); err != nil || got[0] != '1' {
		t.Errorf("%q, %v", got, err)
	}
	// One sees its end, and both forget it.
	c.Close()
	for i := range p.lbs {
		p.knows(i, k, func(_ Flow, err error) bool { return errors.Is(err, errNoFlow) })
	}
	if _, err := p.lbs[0].Flow(keyOfConn(old, 0)); err != nil {
		t.Errorf("another one: %v", err)
	}
}

// TestPartnerApart checks that each disconnected load balancer continues with its own flows, and
// they compare later.
func TestPartnerApart(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	p.start(0)
	p.start(1)
	c := dial(t, p.client, service4)
	if got, err := ask(c, "a", patience); err != nil || got[0] != '1' { // it is open, and reported
		t.Fatalf("%q, %v", got, err)
	}
	k := keyOfConn(c, 0)
	p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	p.ends[1]()
	p.by(1)
	if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
		t.Errorf("known before: %q, %v", got, err)
	}
	if _, err := p.lbs[0].Change(k, func(fl *Flow) { fl.Epoch = 4 }); err != nil {
		t.Fatal(err)
	}
	apart := dial(t, p.client, service4)
	if got, err := ask(apart, "a", patience); err != nil || got[0] != '2' {
		t.Fatalf("%q, %v", got, err)
	}
	p.start(1)
	p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Epoch == 4 })
	p.knows(0, keyOfConn(apart, 0), func(fl Flow, err error) bool { return err == nil && fl.Owner == 2 })
	p.by(0)
	if got, err := ask(apart, "b", patience); err != nil || got[0] != '2' {
		t.Errorf("%q, %v", got, err)
	}
	// Both have learned a flow at different hosts. The lesser name wins.
	both := Key{Client: netip.MustParseAddrPort("10.8.0.1:7")}
	for i, owner := range []move.Backend{2, 1} {
		if err := p.agents[i].f.learn(both, move.Flow{Owner: owner}, kernel.Monotonic(), flow.Told); err != nil {
			t.Fatal(err)
		}
		p.lbs[i].changed(both)
	}
	p.knows(1, both, func(fl Flow, err error) bool { return err == nil && fl.Owner == 2 })
	p.knows(0, both, func(fl Flow, err error) bool { return err == nil && fl.Owner == 2 })
}

// TestPartnerFlood checks that flows of a SYN flood stay unknown to the partner, and are forgotten
// as soon as without one. An open connection is reported at once.
func TestPartnerFlood(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	p.start(0)
	p.start(1)
	client := &scene{client: p.client}
	var made [2]Key
	for i := range made {
		from := netip.AddrPortFrom(netip.MustParseAddr("10.1.0.77"), uint16(5555+i)) // nobody's
		made[i] = Key{Client: from}
		forge(t, client, from, service4, tcpSYN)
		becomes(t, p.lbs[0], made[i], "known", func(fl Flow) bool { return fl.Opening })
	}
	change(t, p.lbs[0], made[1], func(v *bpf.LBLbFlow) { v.Out = 1 }) // answered by a host
	for range 3 {                                                     // once this one is known there, all earlier reports have been sent
		for _, k := range made {
			p.lbs[0].changed(k) // as in a complete report
		}
		start := time.Now()
		c := dial(t, p.client, service4)
		if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
			t.Fatalf("%q, %v", got, err)
		}
		p.knows(1, keyOfConn(c, 0), func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
		if took := time.Since(start); took > tellAll/2 {
			t.Errorf("the other load balancer hears of a new connection after %v", took)
		}
	}
	for _, k := range made {
		if fl, err := p.lbs[1].Flow(k); !errors.Is(err, errNoFlow) {
			t.Errorf("%s is known to the other load balancer: %+v, %v", k.Client, fl, err)
		}
		change(t, p.lbs[0], k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
		p.knows(0, k, func(_ Flow, err error) bool { return errors.Is(err, errNoFlow) })
	}
}

// TestPartnerFloodBalanced is TestPartnerFlood for a flood reassigned from an unwell backend.
func TestPartnerFloodBalanced(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	p.start(0)
	p.start(1)
	for _, ns := range p.hosts { // nobody answers
		down(t, ns, "w0")
	}
	nstest.Until(t, "they know each other's shares", func() bool { return p.agents[0].pair.knows() && p.agents[1].pair.knows() })
	sc := &scene{client: p.client, f: p.lbs[0]}
	k := Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")} // nobody's
	forge(t, sc, k.Client, service4, tcpSYN)
	becomes(t, sc.f, k, "known", func(fl Flow) bool { return fl.Opening && fl.Owner == 1 })
	sc.unwell(t, 1)
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(2*time.Second) })
	forge(t, sc, k.Client, service4, tcpSYN)
	becomes(t, sc.f, k, "balanced", func(fl Flow) bool { return fl.Owner == 2 && fl.Epoch == 1 })
	for i := range uint16(3) { // once this one is known there, all earlier reports have been sent
		sc.f.changed(k)
		live := Key{Client: netip.AddrPortFrom(k.Client.Addr(), 7000+i)}
		if err := sc.f.Learn(live, 1, 0); err != nil {
			t.Fatal(err)
		}
		p.knows(1, live, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	}
	if fl, err := p.lbs[1].Flow(k); !errors.Is(err, errNoFlow) {
		t.Errorf("%+v, %v: it is known to the other load balancer", fl, err)
	}
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen = 1 })
	p.knows(0, k, func(_ Flow, err error) bool { return errors.Is(err, errNoFlow) })
}

// TestPartnerLostInMove checks that a session survives the loss of its load balancer in the middle
// of a move. The agents connect to the partner after the move timeout, and exactly one of them has
// the session.
func TestPartnerLostInMove(t *testing.T) {
	for name, first := range map[string]move.Backend{"the destination comes first": 2, "the source comes first": 1} {
		t.Run(name, func(t *testing.T) {
			p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
			p.start(0)
			p.start(1)
			c := dial(t, p.client, service4)
			if _, err := ask(c, "a", patience); err != nil {
				t.Fatal(err)
			}
			k := keyOfConn(c, 0)
			hosts := func(lb int) *agents {
				s := &agents{t: t, ca: p.ca, address: p.listen[lb], name: lbNames[lb]}
				s.connect(1)
				s.connect(2)
				return s
			}
			p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
			s := hosts(0)
			s.says(1, k, asksHold(1, 2))
			if m := s.hears(1); !m.OK {
				t.Fatal(m)
			}
			p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.To == 2 })
			p.ends[0]()
			time.Sleep(2 * p.agents[1].o.MoveTimeout)
			s = hosts(1)
			word := map[move.Backend]move.Message{1: reclaim(1), 2: flip(1)}
			s.says(first, k, word[first])
			if m := s.hears(first); !m.OK {
				t.Errorf("host %d comes first, and hears %v", first, m)
			}
			s.says(3-first, k, word[3-first])
			if m := s.hears(3 - first); m.OK {
				t.Errorf("both have it: host %d hears %v", 3-first, m)
			}
			if fl, err := p.lbs[1].Flow(k); err != nil || fl.Owner != first {
				t.Errorf("%+v, %v", fl, err)
			}
		})
	}
}
