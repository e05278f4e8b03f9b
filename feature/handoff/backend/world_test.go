// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"lb": playLB, "server": playBackend, "remove": playRemove})
	nstest.Main(m)
}

const service = "talk"

// patience exceeds pauses of the machine: no move may time out.
const patience = 10 * time.Second

// longest is the timeout for events that must happen.
const longest = 30 * time.Second

var (
	at4 = netip.MustParseAddrPort("10.55.0.1:9000")
	at6 = netip.MustParseAddrPort("[fd55::1]:9000")
)

// world is a client, a load balancer with its agent, and backends with a keeper, an agent and a member each.
type world struct {
	t       testing.TB
	at      netip.AddrPort
	client  *netns.Handle
	middle  *netns.Handle
	lb      *lb.DataPath
	lbA     *lb.Agent
	hosts   []lb.Backend
	ca      *peertest.Authority
	root    *kernel.Root
	log     *slog.Logger
	servers []*server
	remotes []Remote
	stopF   context.CancelFunc // stops the load balancer's agent
	address string             // of the load balancer's agent
	bare    bool               // the test starts the members
	step    func(server int, name string)
	// lbStep is the Step of the load balancer's agent. park buffers packets at the backends.
	lbStep func(name string)
	park   bool
}

type server struct {
	w      *world
	number int
	ns     *netns.Handle
	keeper string
	limit  int64 // bytes of state kept by the keeper; 0: its default
	agent  *Agent
	stop   func() // stops the agent
	member *handoff.Listener
	talks  sync.WaitGroup
}

// newNetworkless returns a world without namespaces.
func newNetworkless(t testing.TB, at netip.AddrPort) *world {
	w := &world{t: t, at: at, ca: peertest.NewAuthority(t), root: kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(t.Name(), "/", "-"))}
	w.log = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	return w
}

// newNetwork returns a world with only its network.
func newNetwork(t testing.TB, servers int, at netip.AddrPort) *world {
	t.Helper()
	nstest.NeedRoot(t)
	if err := probe.TCRedirect.Check(); err != nil {
		t.Skip("need: kernel", err) // for the load balancer
	}
	w := newNetworkless(t, at)
	w.client = nstest.NewNetns(t)
	w.middle = nstest.NewNetns(t)
	middle := w.middle
	nstest.Cable(t, w.client, "w0", middle, "c")
	nstest.Address(t, w.client, "w0", netip.MustParsePrefix("10.1.0.2/24"), netip.MustParsePrefix("fd01::2/64"))
	nstest.Address(t, middle, "c", netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("fd01::1/64"))
	w.route(w.client, "10.1.0.1", "fd01::1")
	for i := range servers {
		s := &server{w: w, number: i + 1, ns: nstest.NewNetns(t)}
		device := fmt.Sprint("s", s.number)
		nstest.Cable(t, s.ns, "w0", middle, device)
		nstest.Address(t, s.ns, "w0", prefix("10.2.%d.2/24", i), prefix("fd02:%d::2/64", i))
		nstest.Address(t, middle, device, prefix("10.2.%d.1/24", i), prefix("fd02:%d::1/64", i))
		nstest.Address(t, s.ns, "lo", netip.PrefixFrom(at.Addr(), at.Addr().BitLen()))
		w.route(s.ns, fmt.Sprintf("10.2.%d.1", i), fmt.Sprintf("fd02:%d::1", i))
		w.servers = append(w.servers, s)
	}
	w.in(middle, func() error {
		for _, f := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/"+f, []byte("1"), 0); err != nil {
				return err
			}
		}
		return nil
	})
	return w
}

// newWorld starts a complete world. The test configures the agents' peers. All sessions start at the first backend.
func newWorld(t testing.TB, servers int, at netip.AddrPort) *world {
	t.Helper()
	w := newNetwork(t, servers, at)
	w.run()
	return w
}

// run starts everything.
func (w *world) run() {
	t, at := w.t, w.at
	t.Helper()
	devices := []string{"c"}
	var hosts []lb.Backend
	for i, s := range w.servers {
		device, weight := fmt.Sprint("s", s.number), 0
		if i == 0 {
			weight = 1
		}
		devices = append(devices, device)
		hosts = append(hosts, lb.Backend{Number: move.Backend(s.number), Name: device, Interface: nstest.Ifindex(t, w.middle, device), MAC: mac(t, s.ns), Weight: weight})
	}
	w.in(w.middle, func() (err error) {
		if w.lb, err = lb.New(lb.Options{Devices: devices}); err != nil {
			return err
		}
		t.Cleanup(w.lb.Close)
		return errors.Join(w.lb.SetService(lb.Service{ID: 0, Listen: at, Proto: unix.IPPROTO_TCP}), w.lb.SetBackends(hosts))
	})
	w.address = listener(t).Addr().String()
	w.hosts = hosts
	w.startLB(hosts)
	for _, s := range w.servers {
		w.remotes = append(w.remotes, Remote{Name: fmt.Sprint("s", s.number), Number: move.Backend(s.number), Address: listener(t).Addr().String()})
	}
	for _, s := range w.servers {
		s.keep()
		s.start()
		if !w.bare {
			s.serve()
		}
	}
	w.connected()
	w.staffed()
}

// listener reserves a free port for later use.
func listener(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	l.Close()
	return l
}

func listen(t testing.TB, address string) net.Listener {
	t.Helper()
	var l net.Listener
	nstest.Within(t, longest, func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l
}

func (w *world) startLB(hosts []lb.Backend) {
	w.t.Helper()
	var shown []lb.Managed // Manage is not set: they only appear in the agent's status
	for _, h := range hosts {
		shown = append(shown, lb.Managed{Number: h.Number, Name: h.Name})
	}
	a, err := lb.NewAgent(w.lb, lb.AgentOptions{Name: "lb", TLS: w.ca.TLS("lb"), Backends: hosts, Managed: shown, BufferTimeout: 2 * patience, Log: w.log, Step: w.lbStep,
		Services: []lb.Service{{Name: service, Listen: w.at, Proto: unix.IPPROTO_TCP}}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.lbA = a
	l := listen(w.t, w.address)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Serve(ctx, l) }()
	w.stopF = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(func() { w.stopF() })
}

// keep starts the backend's keeper.
func (s *server) keep() {
	t := s.w.t
	s.keeper = filepath.Join(t.TempDir(), "keeper")
	l, err := keeper.Listen(s.keeper)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- keeper.New(keeper.Options{MaxState: s.limit, Log: s.w.log.With("keeper", s.number)}).Serve(ctx, l)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// start starts the backend's agent.
func (s *server) start() {
	t, w := s.w.t, s.w
	t.Helper()
	own := w.remotes[s.number-1]
	o := Options{Name: own.Name, Number: own.Number, TLS: w.ca.TLS(own.Name), LB: Remote{Name: "lb", Address: w.address},
		Services: []Service{{Name: service, ID: 0, Listen: w.at}}, Devices: []string{"w0"}, Keeper: s.keeper, Root: w.root, Netns: s.ns, Timeout: patience, Buffer: w.park, Log: w.log.With("server", s.number)}
	for _, r := range w.remotes {
		if r.Number != own.Number {
			o.Peers = append(o.Peers, r)
		}
	}
	if w.step != nil {
		o.Step = func(name string) { w.step(s.number, name) }
	}
	a, err := New(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t, own.Address)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, l) }()
	s.agent = a
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { s.stop() })
}

// staffed waits until the agents know their members. Before, they reject sessions, which then return.
func (w *world) staffed() {
	w.t.Helper()
	w.eventually("agents know the members", func() bool {
		return !slices.ContainsFunc(w.servers, func(s *server) bool {
			home := s.agent.known.Load().home[service]
			return s.member != nil && home != nil && home.members.Load() <= 0
		})
	})
}

// connected waits until every agent has its links.
func (w *world) connected() {
	w.t.Helper()
	w.eventually("agents are connected", func() bool {
		for _, s := range w.servers {
			st, err := s.agent.Status()
			if err != nil || !st.LB || !st.Keeper {
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

func (w *world) eventually(what string, f func() bool) {
	w.t.Helper()
	err := nstest.Poll(longest, func() error {
		if !f() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
	if err == nil {
		return
	}
	for _, s := range w.servers {
		if s.agent != nil { // otherwise it is a separate process
			st, err := s.agent.Status()
			w.t.Logf("server %d: %+v, %v", s.number, st, err)
		}
	}
	w.t.Fatal(err)
}

// serve starts a member with the backend's name.
func (s *server) serve() {
	t := s.w.t
	t.Helper()
	err := s.ns.Do(func() (err error) {
		s.member, err = handoff.Listen(context.Background(), "tcp", s.w.at.String(),
			handoff.Options{Service: service, Name: "0", Keeper: s.keeper, Timeout: longest, Log: s.w.log.With("member", s.number)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	l := s.member
	s.talks.Go(func() {
		for {
			c, err := l.AcceptSession()
			if err != nil {
				return
			}
			s.talks.Go(func() {
				if err := talk(c); err != nil && !errors.Is(err, handoff.ErrMoved) && !errors.Is(err, net.ErrClosed) {
					t.Errorf("server %d: %v", s.number, err)
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.talks.Wait()
	})
}

func (w *world) in(ns *netns.Handle, f func() error) {
	w.t.Helper()
	if err := ns.Do(f); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) route(ns *netns.Handle, via ...string) {
	w.t.Helper()
	w.in(ns, func() error {
		for _, v := range via {
			a := netip.MustParseAddr(v)
			if err := netlink.RouteAdd(&netlink.Route{Gw: a.AsSlice(), Dst: nstest.Anywhere(a)}); err != nil {
				return err
			}
		}
		return nil
	})
}

func prefix(format string, a ...any) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(format, a...))
}

func mac(t testing.TB, ns *netns.Handle) (out net.HardwareAddr) {
	t.Helper()
	err := ns.Do(func() error {
		l, err := netlink.LinkByName("w0")
		if err == nil {
			out = l.Attrs().HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	if s := strings.TrimSpace(string(b)); testing.Verbose() {
		fmt.Fprintln(os.Stderr, s)
	}
	return len(b), nil
}

// parseConfig parses the text of the section, as a file of that name.
func parseConfig(file string, text []byte) (*Config, error) {
	c := &Config{}
	if err := strictyaml.Decode(file, text, c); err != nil {
		return nil, err
	}
	return c, errors.Join(c.Validate()...)
}
