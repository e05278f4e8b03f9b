// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
)

// Types of package spec.
type (
	Config  = spec.Config
	Service = spec.Service
	Partner = spec.Partner
)

// Run runs the agent of a load balancer in the network namespace of the process until ctx is done. The data path stays: see [Remove].
func Run(ctx context.Context, root *kernel.Root, c *Config, log *slog.Logger) error {
	return feature.RunAnew(ctx, func() error { return run(ctx, root, c, log) },
		func(reason error) { log.Info("load balancer agent restarting", "name", c.Name, "err", reason) })
}

// run is Run until the devices change.
func run(ctx context.Context, root *kernel.Root, c *Config, log *slog.Logger) error {
	o, err := agentOptions(c)
	if err != nil {
		return err
	}
	o.Log = log
	l, err := accept.TCPAhead(ctx, log, c.Listen)
	if err != nil {
		return fmt.Errorf("listen for backends' agents: %w", err)
	}
	defer l.Close()
	if lacks := listens(c).Lacks(); lacks != "" {
		log.Warn("listening ahead of the address", "listen", c.Listen, "err", lacks)
	}
	f, err := Open(ctx, root, c.Name, Options{Devices: c.Devices, TunnelMTU: c.TunnelMTU, TunnelRootPorts: c.TunnelRootPorts, StartupTimeout: cmp.Or(c.StartupTimeout, defaultStartupTimeout)})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.setServices(c.ServiceAddresses()); err != nil {
		return err
	}
	a, err := NewAgent(f, o)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	socket, err := control.Listen(ctx, controlName(strconv.FormatUint(f.ns.Inode(), 10), c.Name), log)
	if err != nil {
		return err
	}
	group.Go(func() error { return control.Serve(ctx, socket, a.controls(), log) })
	group.Go(func() error { return f.awaitDevices(ctx) })
	log.Info("load balancer agent running", "name", c.Name, "agents", l.Addr().String(), "services", len(c.Services))
	group.Go(func() error { return a.Serve(ctx, l) })
	return group.Wait()
}

func agentOptions(c *Config) (AgentOptions, error) {
	tls, err := c.TLS.LoadFor(c.Name)
	if err != nil {
		return AgentOptions{}, err
	}
	o := AgentOptions{Name: c.Name, TLS: tls, Manage: true, Register: c.Register, Services: c.ServiceAddresses(), Partner: c.Partner,
		BufferTimeout: c.BufferTimeout, MoveTimeout: c.MoveTimeout, EndedTimeout: c.EndedTimeout, IdleTimeout: c.IdleTimeout, AgentTimeout: c.AgentTimeout}
	for _, name := range slices.Sorted(maps.Keys(c.Backends)) {
		h := c.Backends[name]
		o.Managed = append(o.Managed, Managed{Number: move.Backend(h.Number), Name: name, Address: h.Address, Weight: h.EffectiveWeight(), Weighted: h.Weight != nil,
			Services: h.Services, Check: h.Check, Agent: h.Agent})
	}
	return o, nil
}

// controlName returns the name of an agent's control socket.
func controlName(scope, name string) string { return "lb-" + scope + "-" + name }

func (a *Agent) controls() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", control.JSON(a.Status))
	mux.HandleFunc("POST /override", func(w http.ResponseWriter, r *http.Request) {
		if err := a.override(r.FormValue("service"), r.FormValue("client"), r.FormValue("backend")); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	})
	return mux
}

// override pins a client to a backend. An empty backend ends the override.
func (a *Agent) override(service, client, backend string) error {
	keys, err := flow.Keys(a.o.Services, service, client)
	if err != nil {
		return err
	}
	if backend == "" {
		return each(keys, a.f.Release)
	}
	a.mu.Lock()
	to := move.Backend(0)
	for _, m := range a.members {
		if m.Name == backend && m.found() {
			to = m.Number
		}
	}
	a.mu.Unlock()
	if to == 0 {
		return fmt.Errorf("no backend %q with a known location: see weir lb status", backend)
	}
	return each(keys, func(k Key) error { return a.f.override(k, to) })
}

func each(keys []Key, do func(Key) error) error {
	var errs []error
	for _, k := range keys {
		errs = append(errs, do(k))
	}
	return errors.Join(errs...)
}

// Statuses returns the status of all load balancers. Without an agent it reads the pins.
func Statuses(ctx context.Context, root *kernel.Root) (out []Status, err error) {
	all, err := Instances(root)
	_, unread, uerr := store.All(root)
	for _, inst := range all {
		if unread.Has(inst) {
			continue
		}
		s, e := readStatus(ctx, root, inst)
		s.Name, s.Netns, s.Devices = inst.Name[len(spec.PinPrefix):], inst.Scope, deviceFaults(root, inst)
		s.Gone = !s.Agent && gone(root, inst)
		out = append(out, s)
		err = errors.Join(err, e)
	}
	return out, errors.Join(err, uerr)
}

// gone reports whether the network namespace of an instance is gone. It is false for users other than root, because they see few namespaces.
func gone(root *kernel.Root, inst kernel.Instance) bool {
	ns, err := root.OpenNetns(inst)
	if err == nil {
		ns.Close()
	}
	return users.SeesAll() && errors.Is(err, netns.ErrGone)
}

// Unread returns an error about unreadable load balancers, nil if there are none. [Statuses] omits them.
func Unread(root *kernel.Root) error {
	_, unread, err := store.All(root)
	return errors.Join(err, unread.WithoutDamage().Err())
}

// readStatus asks the agent of a load balancer. Without a good answer it reads the pins.
func readStatus(ctx context.Context, root *kernel.Root, inst kernel.Instance) (s Status, err error) {
	problem := ""
	body, err := request(ctx, http.MethodGet, inst, "/status")
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	if err == nil {
		s.Problem = "" // of readers alone
		return s, nil
	} else if !errors.Is(err, control.ErrNoAnswer) {
		problem = fmt.Sprintf("%s: %.200s", control.Path(controlName(inst.Scope, inst.Name[len(spec.PinPrefix):])), printable.OneLine(err.Error()))
	}
	f, err := View(root, inst)
	if err != nil {
		return Status{Problem: problem}, err
	}
	defer f.Close()
	s, err = f.Status()
	s.Problem = problem
	return s, err
}

// Override asks the agent of a load balancer to pin a client of a service to a backend. An empty backend ends the override.
func Override(ctx context.Context, root *kernel.Root, name, service, client, backend string) error {
	all, err := Instances(root)
	if err != nil {
		return err
	}
	for _, inst := range all {
		if inst.Name == spec.PinPrefix+name {
			_, err := request(ctx, http.MethodPost, inst, "/override?"+url.Values{"service": {service}, "client": {client}, "backend": {backend}}.Encode())
			return err
		}
	}
	return errOther(name, all)
}

// OnlyName returns the common name of the pinned load balancers.
func OnlyName(root *kernel.Root) (string, error) {
	all, err := Instances(root)
	if err != nil {
		return "", err
	}
	return onlyName(all)
}

func onlyName(all []kernel.Instance) (string, error) {
	names := map[string]bool{}
	for _, inst := range all {
		names[inst.Name[len(spec.PinPrefix):]] = true
	}
	return spec.OnlyName(names)
}

// errOther is the error about an unknown name. It lists the existing names.
func errOther(name string, all []kernel.Instance) error {
	var names []string
	for _, inst := range all {
		names = append(names, inst.Name[len(spec.PinPrefix):])
	}
	if len(names) == 0 {
		return fmt.Errorf("no load balancer %q is here: lb in weir.yaml creates one", name)
	}
	return fmt.Errorf("no load balancer %q is here: name one of %s", name, strings.Join(slices.Compact(slices.Sorted(slices.Values(names))), ", "))
}

func request(ctx context.Context, method string, inst kernel.Instance, path string) ([]byte, error) {
	body, err := control.Request(ctx, controlName(inst.Scope, inst.Name[len(spec.PinPrefix):]), method, path)
	if errors.Is(err, control.ErrNoAnswer) {
		err = fmt.Errorf("the load balancer's agent does not answer: %w: run weir serve", err)
	}
	return body, err
}
