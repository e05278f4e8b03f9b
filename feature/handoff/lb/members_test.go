// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/loads"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
)

// registrar is a host's agent that registers and stores the announcements.
type registrar struct {
	c    *peer.Conn
	mu   sync.Mutex
	told peer.Peers
	err  error // of the ended connection
	mute chan struct{}
}

// managed returns a scene whose agent knows only the hosts in o.
func managed(t *testing.T, o AgentOptions) (*scene, *peertest.Authority, *Agent, string) {
	t.Helper()
	sc := emptyScene(t)
	ca, a, at := manage(t, sc, o)
	return sc, ca, a, at
}

func emptyScene(t *testing.T) *scene {
	t.Helper()
	sc := newScene(t)
	if err := sc.f.SetBackends([]Backend{}); err != nil {
		t.Fatal(err)
	}
	return sc
}

// managedPair is managed for an agent of a pair whose partner does not connect.
func managedPair(t *testing.T, names map[move.Backend]string) (*peertest.Authority, *Agent, string) {
	t.Helper()
	return manageChanged(t, emptyScene(t), AgentOptions{Register: true}, func(a *Agent) {
		a.pair = newPairing()
		a.pair.names = names
	})
}

// manage starts an agent on a scene's data path.
func manage(t *testing.T, sc *scene, o AgentOptions) (*peertest.Authority, *Agent, string) {
	t.Helper()
	return manageChanged(t, sc, o, func(*Agent) {})
}

// manageChanged is manage for an agent with changes before it serves.
func manageChanged(t *testing.T, sc *scene, o AgentOptions, change func(*Agent)) (*peertest.Authority, *Agent, string) {
	t.Helper()
	ca := peertest.NewAuthority(t)
	o.Name, o.TLS, o.Manage, o.AgentTimeout = "lb", ca.TLS("lb"), true, cmp.Or(o.AgentTimeout, patience)
	o.Services = []Service{{Name: "four", ID: 0, Listen: service4, Proto: unix.IPPROTO_TCP}, {Name: "six", ID: 1, Listen: service6, Proto: unix.IPPROTO_TCP}}
	a, err := NewAgent(sc.f, o)
	if err != nil {
		t.Fatal(err)
	}
	change(a)
	l, err := net.Listen("tcp", "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- a.Serve(t.Context(), l) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return ca, a, net.JoinHostPort("127.0.0.1", strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
}

func register(t *testing.T, ca *peertest.Authority, at, name string, number move.Backend, r peer.Registration) *registrar {
	t.Helper()
	h := &registrar{mute: make(chan struct{})}
	c, err := peer.Dial(t.Context(), at, "lb", ca.TLS(name), peer.Hello{Number: number, Instance: peer.NewInstance(), Name: name,
		Beside: &peer.Beside{Register: r, Peers: func(p peer.Peers) {
			h.mu.Lock()
			h.told = p
			h.mu.Unlock()
			select {
			case <-h.mute: // from here on it reads nothing and sends no pong
				<-t.Context().Done()
			default:
			}
		}}})
	if err != nil {
		t.Fatal(err)
	}
	h.c = c
	t.Cleanup(func() { c.Close() })
	go func() {
		for {
			if _, err := c.Receive(); err != nil {
				h.mu.Lock()
				h.err = err
				h.mu.Unlock()
				return
			}
		}
	}()
	return h
}

// hears waits for an announcement.
func (h *registrar) hears(t *testing.T, want func(peer.Peers) bool) {
	t.Helper()
	nstest.Eventually(t, func() error {
		h.mu.Lock()
		told, err := h.told, h.err
		h.mu.Unlock()
		if want(told) {
			return nil
		}
		return fmt.Errorf("told %.1000s, %v", fmt.Sprintf("%+v", told), err)
	})
}

func ups(p peer.Peers) (names []string) {
	for _, m := range p.Members {
		if m.Up {
			names = append(names, m.Name)
		}
	}
	return names
}

// owners returns the number of n new flows by host.
func owners(t *testing.T, sc *scene, at netip.AddrPort, n int) map[byte]int {
	t.Helper()
	of := map[byte]int{}
	for range n {
		c := dial(t, sc.client, at)
		got, err := ask(c, "a", patience)
		if err != nil {
			t.Fatal(err)
		}
		of[got[0]]++
		c.Close()
	}
	return of
}

// TestRegister checks that registered backends are located, get flows of their services by weight,
// and learn of each other.
func TestRegister(t *testing.T) {
	sc, ca, _, at := managed(t, AgentOptions{Register: true})
	serve(t, sc.hosts, service4)
	serve(t, sc.hosts, service6)
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1, Agent: "10.2.0.2:7"})
	one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 && len(p.Services) == 2 })
	waitOwners(t, sc, service4, "1")
	two := register(t, ca, at, "h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 3, Services: []string{"four"}})
	for _, h := range []*registrar{one, two} {
		h.hears(t, func(p peer.Peers) bool {
			return strings.Join(ups(p), " ") == "h1 h2" && p.Members[0].Agent == "10.2.0.2:7" && p.Members[1].Weight == 3
		})
	}
	waitOwners(t, sc, service4, "12")
	if of := owners(t, sc, service4, 40); of['1'] > of['2'] {
		t.Errorf("weights 1 and 3: %v", of)
	}
	if of := owners(t, sc, service6, 10); of['1'] != 10 {
		t.Errorf("host 2 does not serve IPv6: %v", of)
	}
	// It drains itself.
	if err := two.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.1.2")}); err != nil {
		t.Fatal(err)
	}
	one.hears(t, func(p peer.Peers) bool { return p.Members[1].Weight == 0 })
	waitOwners(t, sc, service4, "1")
}

// TestRegisterUnserved checks that a host gets no new flows of a service without a member there. If
// no host has a member, all get new flows.
func TestRegisterUnserved(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true})
	rs := []peer.Registration{{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}, {Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}}
	var hosts []*registrar
	for i, r := range rs {
		hosts = append(hosts, register(t, ca, at, fmt.Sprint("h", i+1), move.Backend(i+1), r))
	}
	waitOwners(t, sc, service4, "12")
	for _, c := range []struct {
		host     int
		unserved []string
		want     string
	}{{1, []string{"six"}, "12"}, {1, []string{"four"}, "1"}, {0, []string{"four", "six"}, "12"}, {1, nil, "2"}, {0, nil, "12"}} {
		rs[c.host].Unserved = c.unserved
		if err := hosts[c.host].c.Register(rs[c.host]); err != nil {
			t.Fatal(err)
		}
		// the registration is processed a moment later
		nstest.Eventually(t, func() error {
			st, err := a.Status()
			if err == nil && slices.Equal(st.Backends[c.host].Unserved, c.unserved) {
				return nil
			}
			return fmt.Errorf("status: %+v, %v: want %v", st.Backends[c.host], err, c.unserved)
		})
		waitOwners(t, sc, service4, c.want)
	}
}

// waitOwners waits until new flows go to exactly these hosts.
func waitOwners(t *testing.T, sc *scene, at netip.AddrPort, want string) {
	t.Helper()
	nstest.Eventually(t, func() error {
		of := map[byte]int{}
		for bucket := range buckets {
			var host uint16
			if err := sc.f.maps.LbRing.Lookup(uint32(bucket), &host); err != nil {
				t.Fatal(err)
			}
			of[byte('0'+host)]++
		}
		right := len(of) == len(want)
		for _, h := range want {
			right = right && of[byte(h)] > 0
		}
		if !right {
			return fmt.Errorf("%s: buckets %v, want hosts %s", at, of, want)
		}
		return nil
	})
}

// TestHealth checks that a host gets no new flows while its agent is disconnected or silent, or its
// check fails. It keeps its flows. It gets its share again after recovery. If all hosts are unwell,
// all get new flows.
func TestHealth(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true, AgentTimeout: 700 * time.Millisecond, Managed: []Managed{
		{Number: 2, Name: "h2", Address: netip.MustParseAddr("10.2.1.2"), Weight: 1, Check: "10.2.1.2:9000"}}})
	serve(t, sc.hosts, service4)
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	one.hears(t, func(p peer.Peers) bool { return len(p.Members) == 2 })
	// The check's address has no listener yet: the service's listener is at the service's address
	// only.
	waitOwners(t, sc, service4, "1")
	var l net.Listener
	listen := func() {
		do(t, sc.hosts[1], func() (err error) { l, err = net.Listen("tcp", "10.2.1.2:9000"); return err })
	}
	listen()
	waitOwners(t, sc, service4, "12")
	c := dial(t, sc.client, service4)
	for {
		first, err := ask(c, "a", patience)
		if err != nil {
			t.Fatal(err)
		}
		if first[0] == '1' {
			break
		}
		c = dial(t, sc.client, service4)
	}
	close(one.mute) // it stops at its next message, as in a debugger
	a.mu.Lock()
	a.news = true
	a.mu.Unlock()
	waitOwners(t, sc, service4, "2")
	if got, err := ask(c, "b", patience); err != nil || got[0] != '1' {
		t.Errorf("%q, %v: a flow has left its host", got, err)
	}
	l.Close()
	waitOwners(t, sc, service4, "12")
	listen()
	defer l.Close()
	waitOwners(t, sc, service4, "2")
	one = register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	waitOwners(t, sc, service4, "12")
	one.c.Close()
	waitOwners(t, sc, service4, "2")
}

// TestRegisterBeforeOthers checks that an agent with an earlier agent's data path waits for the
// hosts in it, and changes nothing meanwhile. A host that never returns delays the others only for
// that time.
func TestRegisterBeforeOthers(t *testing.T) {
	sc := newScene(t)
	ca, _, at := manage(t, sc, AgentOptions{Register: true})
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
	waitOwners(t, sc, service4, "1")
}

// TestIllStaysIll checks that an unwell backend gets no new flows while an agent restarts, as after
// each change of its section.
func TestIllStaysIll(t *testing.T) {
	sc, root := newStage(t)
	var l net.Listener
	do(t, sc.hosts[0], func() (err error) { l, err = net.Listen("tcp", "10.2.0.2:9000"); return err })
	defer l.Close()
	ca := peertest.NewAuthority(t)
	text := func(weight int) string {
		return fileOf(ca, sc.devices, fmt.Sprintf("backends:\n  h1: {number: 1, address: 10.2.0.2, check: \"10.2.0.2:9000\", weight: %d}\n  h2: {number: 2, address: 10.2.1.2, check: \"10.2.1.2:9000\"}\n", weight))
	}
	ill := func(s Status) bool { return s.Agent && len(s.Backends) == 2 && s.Backends[0].Up && !s.Backends[1].Up }
	stop := running(t, sc, root, text(1))
	status(t, root, ill)
	stop()
	stop = running(t, sc, root, text(2))
	defer stop()
	for began, n := time.Now(), 0; n < 100 || time.Since(began) < 3*time.Second; n++ {
		c := dial(t, sc.client, service4)
		if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
			t.Fatalf("after %s, connection %d: %q, %v: want host 1, which is well", time.Since(began), n, got, err)
		}
		c.Close()
	}
	status(t, root, ill)
}

// TestInheritsOthers checks that the health of backends is restored even if some entries are
// unreadable.
func TestInheritsOthers(t *testing.T) {
	a := &Agent{f: newTable(t, 1), members: map[move.Backend]*member{}}
	placed := map[move.Backend]bool{}
	const n = 8
	for i := range move.Backend(n) {
		for _, number := range []move.Backend{i + 1, MaxBackends + 1 + i} { // the table has no room for the latter
			a.members[number], placed[number] = &member{Managed: Managed{Name: fmt.Sprint("h", number), Check: "10.2.0.2:22"}}, true
		}
	}
	err := a.inherit(placed)
	for number, m := range a.members {
		known := number <= MaxBackends
		if (m.check.good == checkRise) != known || err == nil || strings.Contains(err.Error(), "backend "+m.Name+":") == known {
			t.Errorf("backend %d: %+v, %v", number, m.check, err)
		}
	}
}

// TestRegisterRefused checks the errors about conflicting or invalid registrations.
func TestRegisterRefused(t *testing.T) {
	_, ca, _, at := managed(t, AgentOptions{Register: true, Managed: []Managed{{Number: 7, Name: "h7", Address: netip.MustParseAddr("10.2.0.7"), Weight: 1}}})
	ok := peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}
	register(t, ca, at, "h1", 1, ok).hears(t, func(p peer.Peers) bool { return len(p.Members) == 2 })
	for _, c := range []struct {
		name   string
		number move.Backend
		r      peer.Registration
		says   string
	}{
		{"h2", 1, ok, "number 1 belongs to backend h1"},
		{"h1", 2, ok, "backend h1 has number 1"},
		{"h2", 7, ok, "backend 7 is h7"},
		{"h7", 3, ok, "backend h7 has number 7"},
		{"h7", 7, peer.Registration{Address: netip.MustParseAddr("10.2.0.8")}, "lb.backends has 10.2.0.7 for this backend"},
		{"h2", 2, ok, "is backend h1's"},
		{"h2", 0, ok, "no number"},
		{"h2", 2, peer.Registration{Weight: 1}, "want a unicast address of the backend"},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.0.9"), Weight: -1}, "weight -1"},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.0.9"), Services: []string{"five"}}, `service "five"`},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("::ffff:10.2.0.2"), Weight: 1}, "is backend h1's"},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.0.1"), Weight: 1}, "the load balancer's own"},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.0.9"), Agent: strings.Repeat("a", 60_000) + ":7"}, "want an address for agents"},
		{"h2", 2, peer.Registration{Address: netip.MustParseAddr("fe80::1%" + strings.Repeat("z", 60_000))}, "zone"},
	} {
		register(t, ca, at, c.name, c.number, c.r).hears(t, func(p peer.Peers) bool { return strings.Contains(p.Rejected, c.says) })
	}
}

// TestRejectionStays checks that announcements repeat a rejection until the backend registers again.
func TestRejectionStays(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	h := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: -1})
	announced := func(says string) {
		t.Helper()
		a.mu.Lock()
		a.news = true
		a.mu.Unlock()
		a.kicked()
		h.hears(t, func(p peer.Peers) bool {
			return len(p.Services) > 0 && (says == "") == (p.Rejected == "") && strings.Contains(p.Rejected, says)
		})
	}
	announced("weight -1")
	if err := h.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}); err != nil {
		t.Fatal(err)
	}
	announced("")
}

// TestRegisterNamed checks that the options have precedence over a registration, except for its
// weight 0.
func TestRegisterNamed(t *testing.T) {
	at := netip.MustParseAddr("10.2.0.7")
	_, ca, _, to := managed(t, AgentOptions{Managed: []Managed{
		{Number: 7, Name: "h7", Address: at, Weight: 2, Weighted: true, Services: []string{"four"}},
		{Number: 8, Name: "h8", Address: netip.MustParseAddr("10.2.0.8"), Weight: 1}}})
	is := func(h *registrar, number move.Backend, weight int, services ...string) {
		t.Helper()
		h.hears(t, func(p peer.Peers) bool {
			for _, m := range p.Members {
				if m.Number == number {
					return m.Agent == "x:7" && m.Weight == weight && slices.Equal(m.Services, services)
				}
			}
			return false
		})
	}
	for _, c := range []struct{ said, goes int }{{1, 2}, {0, 0}, {5, 2}} {
		h := register(t, ca, to, "h7", 7, peer.Registration{Address: at, Weight: c.said, Agent: "x:7"})
		is(h, 7, c.goes, "four")
		h.c.Close()
	}
	is(register(t, ca, to, "h8", 8, peer.Registration{Address: netip.MustParseAddr("10.2.0.8"), Weight: 3, Services: []string{"six"}, Agent: "x:7"}), 8, 3, "six")
	register(t, ca, to, "h9", 9, peer.Registration{Address: netip.MustParseAddr("10.2.0.9"), Weight: 1}).hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "unknown backend: name it in lb.backends, or set lb.register: true")
	})
}

// TestLoads checks that reported loads are shown until the host reports no member or disconnects.
func TestLoads(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	h := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 })
	shows := func(want map[string]uint32) {
		t.Helper()
		nstest.Eventually(t, func() error {
			st, err := a.Status()
			if err != nil {
				t.Fatal(err)
			}
			if len(st.Backends) == 1 && maps.Equal(st.Backends[0].Loads, want) {
				return nil
			}
			return fmt.Errorf("%+v, want %v", st.Backends, want)
		})
	}
	say := func(service uint16, n uint32) {
		t.Helper()
		if err := h.c.SendLoad(service, n, false); err != nil {
			t.Fatal(err)
		}
	}
	say(0, 3)
	say(1, 5)
	shows(map[string]uint32{"four": 3, "six": 5})
	say(1, loads.Nobody)
	shows(map[string]uint32{"four": 3})
	// The host's agent restarts before the end of its old connection is noticed. Old and later
	// loads from that connection do not count.
	a.mu.Lock()
	before := a.backends[1]
	a.mu.Unlock()
	h = register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 })
	shows(nil)
	a.noteLoad(before, peer.Frame{Flow: peer.Flow{Service: 0}, Load: 9})
	shows(nil)
	say(0, 4)
	shows(map[string]uint32{"four": 4})
	h.c.Close()
	shows(nil)
}
