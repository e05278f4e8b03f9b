// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/rig"
)

// endedTimeout is the lifetime of ended flows in the table. It is short because leftovers are counted soon
// after.
const endedTimeout = 200 * time.Millisecond

// startLB starts the load balancer. No session existed before, so it need not wait for backends to report
// theirs.
func (w *world) startLB() error {
	if w.stepped {
		return w.stepLB()
	}
	devices := "client"
	for _, h := range w.servers {
		devices += ", " + h.name()
	}
	return w.serve(&w.lb, w.middle, "lb", fmt.Sprintf(`
lb:
  name: %s
  devices: [%s]
  listen: 0.0.0.0:%d
  tls: %s
  register: true
  startup_timeout: 10ms
  ended_timeout: %s
  services:
    %s: {number: 0, listen: [tcp %s]}
`, w.balancer, devices, lbPort, w.certs.TLS(w.balancer), endedTimeout, service, serviceAt))
}

// startBackend starts a server's processes for moving sessions.
func (h *host) startBackend() error {
	if h.w.stepped {
		if err := h.startKeeper(); err != nil {
			return err
		}
		return h.stepAgent()
	}
	buffer := ""
	if h.w.park {
		buffer = "buffer: true"
	}
	err := h.w.serve(&h.agent, h.site, "backend,keeper", fmt.Sprintf(`%s
  backend:
    name: %s
    number: %d
    weight: %d
    address: %s
    listen: %s:%d
    lb: {name: %s, address: 10.2.%d.1:%d}
    tls: %s
    devices: [up]
    keeper: %s
    %s
`, h.keeperSection(), h.name(), h.number, h.weight, h.address(), h.address(), agentPort, h.w.balancer, h.number, lbPort, h.w.certs.TLS(h.name()), h.socket(), buffer),
		"--handoff-socket", h.socket())
	if err != nil {
		return err
	}
	return h.keeps()
}

// startKeeper starts the session keeper alone.
func (h *host) startKeeper() error {
	if err := h.w.serve(&h.keeper, h.site, "keeper", h.keeperSection()+"\n", "--handoff-socket", h.socket()); err != nil {
		return err
	}
	return h.keeps()
}

// keeperSection returns the section handoff with the keeper's part.
func (h *host) keeperSection() string {
	size := keeper.Size(1 << 20)
	if h.w.state > 0 {
		size = keeper.Size(h.w.state)
	}
	return fmt.Sprintf("handoff:\n  keeper: {max_state: %s}", size)
}

// keeps waits for the keeper.
func (h *host) keeps() error {
	return within(patience, "the keeper", func() (bool, error) {
		c, err := net.Dial("unixpacket", h.socket())
		if err == nil {
			c.Close()
		}
		return err == nil, err
	})
}

// serve starts weir serve with some features at a site.
func (w *world) serve(p **process, at site, only, text string, flags ...string) (err error) {
	out := &tail{}
	started, err := rig.Serve{Namespace: at.name, Name: at.name + "-" + only, Root: w.pins(at), Only: only, Text: text, Flags: flags, Output: out}.Start(w.env)
	if err == nil {
		*p = &process{Process: started, errs: out}
	}
	return err
}

// placed reports whether the load balancer has the placement of every server.
func (w *world) placed() (bool, error) {
	if w.stepped {
		return true, nil // configured at its start
	}
	all, err := lb.Statuses(context.Background(), kernel.OpenRoot(w.pins(w.middle)))
	for _, s := range all {
		if s.Name != w.balancer || !s.Agent || s.Starting || len(s.Backends) < len(w.servers) {
			continue
		}
		return !slices.ContainsFunc(s.Backends, func(b lb.BackendStatus) bool { return !b.Up || !b.Connected || b.Where == "" }), nil
	}
	return false, err
}

// flow is a flow of the load balancer.
type flow struct {
	Client netip.AddrPort
	Owner  uint16
}

// flows returns the flows known to the load balancer, from its pins.
func (w *world) flows() (out []flow, err error) {
	root := kernel.OpenRoot(w.pins(w.middle))
	f, err := lb.View(root, kernel.Instance{Scope: kernel.ScopeOf(w.middle.Handle), Feature: "handoff", Name: "lb-" + w.balancer})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	err = f.Flows(func(k lb.Key, fl lb.Flow) bool {
		out = append(out, flow{k.Client, uint16(fl.Owner)})
		return true
	})
	return out, err
}

// override directs a client's next connection to a server.
func (w *world) override(ctx context.Context, client netip.AddrPort, to *host) error {
	return lb.Override(ctx, kernel.OpenRoot(w.pins(w.middle)), w.balancer, service, client.String(), to.name())
}

// status queries the agent of a server.
func (h *host) status() (s backend.Status, err error) {
	if h.w.stepped {
		return s, h.agent.ask("status", &s)
	}
	err = h.site.Do(func() (err error) {
		s, err = backend.StatusHere(context.Background())
		return err
	})
	return s, err
}

// times returns the durations of the latest moves from a server.
func (h *host) times() (transfers, stops []time.Duration, err error) {
	r, err := control.Client("backend-" + strconv.FormatUint(h.site.Inode(), 10)).Get("http://agent/times")
	if err != nil {
		return nil, nil, err
	}
	defer r.Body.Close()
	var t struct {
		Transfer []time.Duration `json:"transfer_ns"`
		Stopped  []time.Duration `json:"stopped_ns"`
	}
	err = json.NewDecoder(r.Body).Decode(&t)
	return t.Transfer, t.Stopped, err
}
