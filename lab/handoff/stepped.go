// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/kernel"
)

// Agents of handoff-crash die at named steps of a move. weir serve has no such steps, by design. These
// agents are therefore the lab's own processes, using the Go API with its option Step. The keepers, and all
// processes of the other experiments, are weir serve.

// stepLB starts the agent and the data path of the load balancer.
func (w *world) stepLB() (err error) {
	o := lbRole{Name: w.balancer, Certificates: w.certificates(w.balancer), BufferTimeout: w.hold, Lapse: w.lapse, Root: w.pins(w.middle), Devices: []string{"client"}, Listen: fmt.Sprintf(":%d", lbPort),
		Service: lb.Service{ID: 0, Listen: serviceAt, Proto: unix.IPPROTO_TCP}}
	for _, h := range w.servers {
		o.Devices = append(o.Devices, h.name())
		at := lb.Backend{Number: move.Backend(h.number), Name: h.name(), Weight: h.weight}
		if at.Interface, _, err = linkOf(w.middle, h.name()); err != nil {
			return err
		}
		if _, at.MAC, err = linkOf(h.site, "up"); err != nil {
			return err
		}
		o.Backends = append(o.Backends, at)
	}
	w.lb, err = w.play(w.middle, "lb", o, nil)
	return err
}

func linkOf(at site, name string) (index int, mac net.HardwareAddr, err error) {
	err = at.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			index, mac = l.Attrs().Index, l.Attrs().HardwareAddr
		}
		return err
	})
	return index, mac, err
}

// stepAgent starts the agent of a server.
func (h *host) stepAgent() (err error) {
	w := h.w
	o := agentRole{Certificates: w.certificates(h.name()), Root: w.pins(h.site), Listen: fmt.Sprintf("%s:%d", h.address(), agentPort),
		Options: backend.Options{Name: h.name(), Number: move.Backend(h.number), Keeper: h.socket(), Devices: []string{"up"}, Buffer: w.park,
			LB:       backend.Remote{Name: h.w.balancer, Address: fmt.Sprintf("10.2.%d.1:%d", h.number, lbPort)},
			Services: []backend.Service{{Name: service, Listen: serviceAt}}}}
	for _, p := range w.servers {
		if p != h {
			o.Options.Peers = append(o.Options.Peers, backend.Remote{Name: p.name(), Number: move.Backend(p.number), Address: fmt.Sprintf("%s:%d", p.address(), agentPort)})
		}
	}
	h.agent, err = w.play(h.site, "agent", o, nil)
	return err
}

func (w *world) certificates(name string) certificates {
	c, k, s := w.certs.Files(name)
	return certificates{c, k, s}
}

// certificates are the files of an agent.
type certificates struct{ Cert, Key, CA string }

func (c certificates) load() (*peer.Identity, error) {
	return peer.Files{Certificate: c.Cert, Key: c.Key, CA: c.CA}.Load()
}

// agentRole is a server's agent.
type agentRole struct {
	Certificates certificates
	Options      backend.Options // without the fields JSON cannot represent
	Root         string
	Listen       string
}

// playAgent answers "status" with a line of JSON. "kill PID … at STEP" makes it kill these processes and
// itself at the next such step.
func playAgent(arg string) error {
	var o agentRole
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	config, err := o.Certificates.load()
	if err != nil {
		return err
	}
	o.Options.TLS, o.Options.Root, o.Options.Log = config, kernel.OpenRoot(o.Root), slog.New(slog.NewTextHandler(os.Stderr, nil))
	var d death
	o.Options.Step = d.at
	a, err := backend.New(context.Background(), o.Options)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, l) }()
	say("ready")
	err = hear(func(words []string) error {
		if words[0] == "kill" {
			return d.plan(words[1:])
		}
		s, err := a.Status()
		if err != nil {
			return err
		}
		b, err := json.Marshal(s)
		say("%s", b)
		return err
	})
	cancel()
	return errors.Join(err, <-ended)
}

// death is a step at which this process kills itself and others. It tells the lab first.
type death struct {
	mu   sync.Mutex
	step string
	with []int
}

// plan parses "PID … at STEP".
func (d *death) plan(words []string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.with = nil
	for i, w := range words {
		if w == "at" {
			d.step = strings.Join(words[i+1:], " ")
			say("dead at %s", d.step)
			return nil
		}
		pid, err := strconv.Atoi(w)
		if err != nil {
			return err
		}
		d.with = append(d.with, pid)
	}
	return fmt.Errorf("kill command without a step: %q", words)
}

func (d *death) at(step string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if step != d.step {
		return
	}
	say("dies")
	for _, pid := range d.with {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {} // the signal takes a moment to arrive
}

// lbRole is a load balancer.
type lbRole struct {
	Name                 string
	Certificates         certificates
	Devices              []string
	Service              lb.Service
	Backends             []lb.Backend
	Listen               string
	BufferTimeout, Lapse time.Duration
	Root                 string
}

// playLB accepts "kill PID … at STEP", like an agent.
func playLB(arg string) error {
	var o lbRole
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	config, err := o.Certificates.load()
	if err != nil {
		return err
	}
	f, err := lb.Open(context.Background(), kernel.OpenRoot(o.Root), o.Name, lb.Options{Devices: o.Devices})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := errors.Join(f.SetService(o.Service), f.SetBackends(o.Backends)); err != nil {
		return err
	}
	var d death
	a, err := lb.NewAgent(f, lb.AgentOptions{Name: o.Name, TLS: config, Backends: o.Backends, EndedTimeout: endedTimeout, BufferTimeout: o.BufferTimeout, MoveTimeout: o.Lapse, Step: d.at,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Serve(ctx, l) }()
	say("ready")
	err = hear(func(words []string) error {
		if words[0] != "kill" {
			return fmt.Errorf("unknown command %q", words)
		}
		return d.plan(words[1:])
	})
	cancel()
	return errors.Join(err, <-ended)
}
