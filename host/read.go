// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/kernel"
)

// Reader answers the reading commands.
type Reader interface {
	Status(ctx context.Context) (Status, error)
	Faults(ctx context.Context) ([]kernel.Fault, error)
	Guards(ctx context.Context) (guard.State, error)
	Filters(ctx context.Context) (filter.State, error)
	Reroute(ctx context.Context) (reroute.State, error)
	Devices(ctx context.Context, service string) (Devices, error)
	Where(ctx context.Context, service string, w steer.WhatIf, sources []string) (Places, error)
	Templates(ctx context.Context, service string) (steer.TemplateState, error)
	Bindings(ctx context.Context, netns string) ([]steer.Binding, error)
	Named(ctx context.Context, netns string) ([]steer.Named, error)
}

// Status is what all features show of themselves.
type Status struct {
	Faults      []kernel.Fault `json:"faults,omitempty"`      // damage to what is pinned, and programs of others
	Unconfirmed *Unconfirmed   `json:"unconfirmed,omitempty"` // the change that weir apply --confirm made
	steer.State
	Guards  []guard.GuardState   `json:"guards,omitempty"`
	Filters []filter.FilterState `json:"filters,omitempty"`
	Reroute *reroute.State       `json:"reroute,omitempty"`
}

// Devices are the sources of one service.
type Devices struct {
	Service string         `json:"service"`
	Devices []steer.Device `json:"devices"`
	Problem string         `json:"problem,omitempty"` // why something is not shown
}

// Places are where sources of one service go.
type Places struct {
	Service string        `json:"service"`
	Places  []steer.Place `json:"addresses"`
}

// Reader reads the pins where this user may, else it asks the weir serve behind
// socket: kernels before 5.19, and any with BPF closed to the unprivileged for
// good, refuse even reading.
func (h *Host) Reader(socket string) Reader {
	_, err := h.Root.Instances("")
	if err == nil {
		_, err = steer.ReadState(context.Background(), h.Root)
	}
	if err == nil {
		_, err = h.Unconfirmed()
	}
	if errors.Is(err, kernel.ErrUnreadable) || errors.Is(err, os.ErrPermission) {
		return remote{socket, err}
	}
	return pins{h}
}

type pins struct{ *Host }

// Status reads every feature. One that cannot be read keeps no other from being shown
// where damage to the pins is the reason: the faults tell.
func (p pins) Status(ctx context.Context) (out Status, err error) {
	if out.Faults, err = p.Faults(ctx); err != nil {
		return out, err
	}
	if out.Unconfirmed, err = p.Unconfirmed(); err != nil {
		return out, err
	}
	tolerate := func(err error) error {
		if damage(out.Faults) != nil && !errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	}
	if out.State, err = steer.ReadState(ctx, p.Root); tolerate(err) != nil {
		return out, err
	}
	out.CountMisplaced(ctx)
	out.ExplainEmpty(ctx)
	if err := out.NoteUnserved(p.Root); tolerate(err) != nil {
		return out, err
	}
	out.noteFaults()
	g, err := p.Guards(ctx)
	if tolerate(err) != nil {
		return out, err
	}
	f, err := p.Filters(ctx)
	if tolerate(err) != nil {
		return out, err
	}
	out.Guards, out.Filters = g.Guards, f.Filters
	r, err := p.Reroute(ctx)
	if len(r.Paths)+len(r.Sessions) > 0 {
		out.Reroute = &r
	}
	return out, tolerate(err)
}

// noteFaults tells services of damage to their engine.
func (s *Status) noteFaults() {
	for i := range s.Services {
		v := &s.Services[i]
		for _, f := range s.Faults {
			if v.Problem == "" && f.Damage() && f.Feature == "steer" && f.Instance.Scope == v.Scope() && (f.Instance.Name == v.Name || strings.HasPrefix(f.Instance.Name, "@")) {
				v.Problem = f.String() + ": " + f.Remedy
			}
		}
	}
}

func (p pins) Guards(ctx context.Context) (guard.State, error) {
	return guard.ReadState(ctx, p.Root)
}

func (p pins) Filters(ctx context.Context) (filter.State, error) {
	return filter.ReadState(ctx, p.Root)
}

func (p pins) Reroute(ctx context.Context) (reroute.State, error) {
	return reroute.ReadState(ctx, p.Root)
}

func (p pins) Devices(ctx context.Context, service string) (Devices, error) {
	st, err := steer.ReadState(ctx, p.Root)
	if err != nil {
		return Devices{}, err
	}
	s, err := st.Service(service)
	if err != nil {
		return Devices{}, err
	}
	d, problem, err := s.Devices(p.Root)
	out := Devices{Service: s.Name, Devices: d}
	if problem != nil {
		out.Problem = "TCP sessions are not shown: " + problem.Error()
	}
	return out, err
}

func (p pins) Where(ctx context.Context, service string, w steer.WhatIf, sources []string) (Places, error) {
	st, err := steer.ReadState(ctx, p.Root)
	if err != nil {
		return Places{}, err
	}
	s, err := st.Service(service)
	if err != nil {
		return Places{}, err
	}
	addrs, err := s.Sources(sources)
	if err != nil {
		return Places{}, err
	}
	places, err := s.Where(w, addrs...)
	return Places{Service: s.Name, Places: places}, err
}

// Bindings lists what is bound in the namespace with an inode number.
func (p pins) Bindings(ctx context.Context, netns string) ([]steer.Binding, error) {
	return steer.Bindings(ctx, p.Root, netns)
}

// Named lists the services that something is bound to in the namespace with an inode number.
func (p pins) Named(ctx context.Context, netns string) ([]steer.Named, error) {
	return steer.NamedServices(ctx, p.Root, netns)
}

// remote asks weir serve.
type remote struct {
	socket string
	why    error // reading the pins failed with this
}

func (r remote) Status(ctx context.Context) (st Status, err error) {
	return st, r.get(ctx, "/v1/status", nil, &st)
}

func (r remote) Faults(ctx context.Context) (f []kernel.Fault, err error) {
	return f, r.get(ctx, "/v1/faults", nil, &f)
}

func (r remote) Guards(ctx context.Context) (st guard.State, err error) {
	return st, r.get(ctx, "/v1/guard/status", nil, &st)
}

func (r remote) Filters(ctx context.Context) (st filter.State, err error) {
	return st, r.get(ctx, "/v1/filter/list", nil, &st)
}

func (r remote) Reroute(ctx context.Context) (st reroute.State, err error) {
	return st, r.get(ctx, "/v1/reroute/status", nil, &st)
}

func (r remote) Devices(ctx context.Context, service string) (d Devices, err error) {
	return d, r.get(ctx, "/v1/steer/devices", url.Values{"service": {service}}, &d)
}

func (r remote) Bindings(ctx context.Context, netns string) (all []steer.Binding, err error) {
	return all, r.get(ctx, "/v1/steer/bindings", url.Values{"netns": {netns}}, &all)
}

func (r remote) Named(ctx context.Context, netns string) (all []steer.Named, err error) {
	return all, r.get(ctx, "/v1/steer/services", url.Values{"netns": {netns}}, &all)
}

func (r remote) Where(ctx context.Context, service string, w steer.WhatIf, sources []string) (p Places, err error) {
	q := url.Values{"service": {service}, "slots": {strconv.Itoa(w.Slots)}}
	q["address"] = sources
	without := make([]string, len(w.Without))
	for i, n := range w.Without {
		without[i] = strconv.Itoa(n)
	}
	q.Set("without", strings.Join(without, ","))
	return p, r.get(ctx, "/v1/steer/where", q, &p)
}

func (r remote) get(ctx context.Context, path string, q url.Values, into any) error {
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
		if err != nil {
			return nil, err
		}
		if err := accept.CheckServer(c, r.socket, ""); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://weir"+path+"?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("%w; and no weir serve answers on %s: %w", r.why, r.socket, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("weir serve: %s", strings.TrimSpace(string(b)))
	}
	return json.NewDecoder(resp.Body).Decode(into)
}
