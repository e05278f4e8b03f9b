// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/topo"
)

const service = "talk"

var serviceAt = netip.MustParseAddrPort("10.55.0.1:9000")

const (
	lbPort    = 4790
	agentPort = 4791
)

// site is a namespace.
type site struct {
	*netns.Handle
	name string
}

// world is a client, a load balancer, and servers behind it. Each is a network namespace with its own weir
// serve, configured by the weir.yaml of such a machine. The load balancer runs lb, and a server the session
// keeper and the backend. Each server has the service's address, and a member.
type world struct {
	env      *lab.Env
	certs    rig.Certificates
	balancer string // name of the load balancer
	client   site
	middle   site
	servers  []*host
	lb       *process
	stepped  bool // agents are processes of the lab, killed at named steps
	buffer   int  // bytes of members' socket buffers; 0: the kernel's default
	state    int  // bytes of state per session at keepers; 0: the default
	// hold and lapse are settings of the load balancer; 0: the default.
	hold, lapse time.Duration
	park        bool // packets of a moving session wait at the source, not at the load balancer
	// cable connects the client to the load balancer; nil: a direct cable.
	cable func(client, lb topo.End) error
}

// host is a server.
type host struct {
	w      *world
	number int
	site   site
	weight int
	dir    string
	keeper *process
	agent  *process
	member *process

	mu  sync.Mutex
	has map[string]chan struct{} // waiters for a session at this server
	log []string                 // errors
}

func (h *host) name() string    { return fmt.Sprint("s", h.number) }
func (h *host) address() string { return fmt.Sprintf("10.2.%d.2", h.number) }
func (h *host) socket() string  { return filepath.Join(h.dir, "keeper") }

// newWorld creates the namespaces; no process runs yet.
func newWorld(e *lab.Env, name string, servers int) (*world, error) {
	certs, err := rig.NewCertificates(e, name+"-certificates")
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(e.Root, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	w := &world{env: e, certs: certs, balancer: name + "-lb", buffer: 64 << 10}
	for _, s := range []struct {
		site *site
		name string
	}{{&w.client, name + "-client"}, {&w.middle, name + "-lb"}} {
		if s.site.Handle, s.site.name, err = e.Namespace(s.name); err != nil {
			return nil, err
		}
	}
	for i := range servers {
		h := &host{w: w, number: i + 1, weight: 1, has: map[string]chan struct{}{}}
		if h.site.Handle, h.site.name, err = e.Namespace(name + "-" + h.name()); err != nil {
			return nil, err
		}
		h.dir = filepath.Join(e.Dir, name+"-"+h.name())
		if err := os.Mkdir(h.dir, 0o700); err != nil {
			return nil, err
		}
		w.servers = append(w.servers, h)
	}
	return w, nil
}

// pins returns the root of a machine's pins. Each machine has its own, because every process checks all
// pins of its root for damage.
func (w *world) pins(at site) string { return filepath.Join(w.env.Root, at.name) }

// wire connects all namespaces.
func (w *world) wire() error {
	if w.cable == nil {
		w.cable = topo.Cable
	}
	err := w.cable(topo.End{NS: w.client.Handle, Name: "up", Addrs: prefixes("10.1.0.2/24")},
		topo.End{NS: w.middle.Handle, Name: "client", Addrs: prefixes("10.1.0.1/24")})
	if err != nil {
		return err
	}
	anywhere := netip.MustParsePrefix("0.0.0.0/0")
	if err := topo.Route(w.client.Handle, anywhere, netip.MustParseAddr("10.1.0.1")); err != nil {
		return err
	}
	if err := topo.Sysctl(w.middle.Handle, "net.ipv4.ip_forward", "1"); err != nil {
		return err
	}
	for _, h := range w.servers {
		gateway := fmt.Sprintf("10.2.%d.1", h.number)
		err := topo.Cable(topo.End{NS: h.site.Handle, Name: "up", Addrs: prefixes(h.address() + "/24")},
			topo.End{NS: w.middle.Handle, Name: h.name(), Addrs: prefixes(gateway + "/24")})
		if err != nil {
			return err
		}
		if err := topo.Addresses(h.site.Handle, netip.PrefixFrom(serviceAt.Addr(), 32)); err != nil {
			return err
		}
		if err := topo.Route(h.site.Handle, anywhere, netip.MustParseAddr(gateway)); err != nil {
			return err
		}
	}
	return topo.Addresses(w.client.Handle)
}

func prefixes(s ...string) (out []netip.Prefix) {
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// start starts all processes, and waits until the agents are connected.
func (w *world) start() error {
	if err := w.wire(); err != nil {
		return err
	}
	if err := w.startLB(); err != nil {
		return err
	}
	for _, h := range w.servers {
		if err := errors.Join(h.startBackend(), h.startMember()); err != nil {
			return err
		}
	}
	return w.connected()
}

func (w *world) connected() error {
	return within(patience, "connections of the agents", func() (bool, error) {
		if ready, err := w.placed(); !ready || err != nil {
			return false, err
		}
		for _, h := range w.servers {
			s, err := h.status()
			if err != nil || !s.LB || !s.Keeper || len(s.Peers) < len(w.servers)-1 {
				return false, err
			}
			for _, there := range s.Peers {
				if !there {
					return false, nil
				}
			}
		}
		return true, nil
	})
}

func within(d time.Duration, what string, f func() (bool, error)) error {
	for end := time.Now().Add(d); ; time.Sleep(2 * time.Millisecond) {
		done, err := f()
		if done {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("timeout after %s, waiting for %s", d, what), err)
		}
	}
}

func (h *host) startMember() (err error) {
	h.member, err = h.w.play(h.site, "member", memberRole{Keeper: h.socket(), Name: "0", Listen: serviceAt, Buffer: h.w.buffer, Orphan: true}, h.heard)
	return err
}

// heard handles a line of the member.
func (h *host) heard(line string) {
	verb, rest, _ := strings.Cut(line, " ")
	h.mu.Lock()
	defer h.mu.Unlock()
	if verb != "has" {
		h.log = append(h.log, line)
		return
	}
	if c := h.has[rest]; c != nil {
		close(c)
		delete(h.has, rest)
	}
}

// expect returns a channel, closed when the member has received a client's session.
func (h *host) expect(remote string) <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := make(chan struct{})
	h.has[remote] = c
	return c
}

// complaints returns the member's errors.
func (h *host) complaints() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string(nil), h.log...)
}

// early reports whether a move was rejected after since errors because no destination was ready. Connected
// agents report to their keepers a moment later.
func (h *host) early(since int) bool {
	return slices.ContainsFunc(h.complaints()[since:], func(s string) bool { return strings.Contains(s, "is ready besides") })
}

// stop ends the processes. The next part has the machine to itself.
func (w *world) stop() {
	for _, h := range w.servers {
		for _, p := range []*process{h.member, h.agent, h.keeper} {
			if p != nil {
				_ = p.kill()
			}
		}
	}
	if w.lb != nil {
		_ = w.lb.kill()
	}
}
