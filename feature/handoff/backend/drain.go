// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/sockdiag"
)

// Drained is the progress of a drain.
type Drained struct {
	Backend  string `json:"backend"`
	Asked    int    `json:"asked"`    // sessions with a requested move
	Left     int    `json:"left"`     // remaining sessions with members able to move them
	Immobile int    `json:"immobile"` // sessions with members unable to move any: they end by themselves
	Others   int    `json:"others"`   // connections to the services that cannot move, for example of nginx
	// Unnamed counts the sessions among Others whose service is unknown to the load balancer, by service.
	Unnamed map[string]int `json:"unnamed_services,omitempty"`
	Blocked []Blocked      `json:"blocked,omitempty"`
	Reason  string         `json:"reason,omitempty"`
	Failed  bool           `json:"failed,omitempty"`
}

// Draining are the options of a drain.
type Draining struct {
	Undo        bool // restore the weight, and move nothing
	All         bool // also wait for the end of immovable connections
	AllowOutage bool // drain also the last backend of a service
}

// drain sets this backend's share of new flows to zero, and moves all of its sessions to other backends. It returns
// when no movable session remains and the load balancer sends no new ones, or with the error of ctx.
func (a *Agent) drain(ctx context.Context, how Draining, progress func(Drained)) error {
	if !a.o.Registration.Address.IsValid() {
		return errors.New("this backend does not register with the load balancer: set its weight there")
	}
	c := a.lb.conn()
	if !how.Undo {
		if reason := a.rejected(); c == nil && reason != "" {
			return fmt.Errorf("the load balancer rejects this backend: %s; nothing was changed: sessions cannot move until it accepts it", reason)
		} else if c == nil {
			return errors.New("the load balancer is not connected: sessions cannot move, and new ones would still arrive; nothing was changed: start weir serve there, then drain again")
		}
		if only := a.onlyHere(); len(only) > 0 && !how.AllowOutage {
			return fmt.Errorf("no other backend with weight serves %s: new connections would fail; nothing was changed: "+
				"undrain another backend first, or give --allow-outage", strings.Join(only, ", "))
		}
	}
	a.asked.reset()
	if how.Undo {
		a.setWeight(a.o.Registration.Weight)
		if c == nil {
			return nil // the next registration has the weight
		}
		return c.Register(a.registration())
	}
	was := a.setWeight(0)
	if err := c.Register(a.registration()); err != nil {
		a.setWeight(was) // it would take effect with the next connection
		return fmt.Errorf("tell the load balancer, so nothing was changed: %w", err)
	}
	out, err := a.empty(ctx, how, progress)
	switch {
	case err == nil:
		return nil
	case !out: // the load balancer may have read the registration, or reads the next one
		return fmt.Errorf("%w; the load balancer has not confirmed weight 0, and it may still take effect: weir handoff drain --undo restores the weight", err)
	}
	return fmt.Errorf("%w; new flows stay stopped: weir handoff drain --undo restores the weight", err)
}

// empty moves the sessions of a backend with weight 0. out reports whether the load balancer has confirmed the weight.
func (a *Agent) empty(ctx context.Context, how Draining, progress func(Drained)) (out bool, err error) {
	for {
		if out, err = a.outOfShare(); err != nil { // before counting, to include sessions arrived until then
			return out, err
		}
		d, err := a.drainStep(ctx)
		if err != nil {
			return out, err
		}
		if !out && d.Left == 0 {
			d.Reason = "the load balancer has not yet confirmed the drain"
		}
		progress(d)
		stays := d.Immobile + d.Others
		if d.Left == 0 && out && (stays == 0 || !how.All) {
			return out, nil
		}
		select {
		case <-ctx.Done():
			if !out {
				return out, fmt.Errorf("new sessions may still arrive, and %d remain: %w", d.Left, ctx.Err())
			}
			return out, fmt.Errorf("%s remain: %w", printable.Count(d.Left+stays, "session"), ctx.Err())
		case <-time.After(drainEvery):
		}
	}
}

// rejected returns the latest reason why the load balancer rejects this backend, "" for none.
func (a *Agent) rejected() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unwanted
}

// setWeight sets the weight of the next registration, and returns the previous one.
func (a *Agent) setWeight(weight int) (was int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was, a.weight, a.share = a.weight, weight, unknown
	return was
}

// onlyHere returns this backend's services, by name, for which no other backend gets new flows. It returns none if this
// backend gets none itself.
func (a *Agent) onlyHere() (only []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.weight == 0 {
		return nil
	}
	serves := func(m peer.Member, service string) bool {
		return len(m.Services) == 0 || slices.Contains(m.Services, service)
	}
	services := map[string]bool{}
	for _, s := range a.balanced {
		services[s.Name] = services[s.Name] || slices.ContainsFunc(a.members, func(m peer.Member) bool {
			return m.Number != a.o.Number && m.Up && m.Weight > 0 && serves(m, s.Name)
		})
	}
	own := peer.Member{Services: a.o.Serve}
	for name, elsewhere := range services {
		if !elsewhere && serves(own, name) {
			only = append(only, name)
		}
	}
	slices.Sort(only)
	return only
}

// unknown is a value that the load balancer has not sent.
const unknown = -1

// outOfShare reports whether the load balancer gives this backend no more new sessions.
func (a *Agent) outOfShare() (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unwanted != "" {
		return false, fmt.Errorf("the load balancer rejects this backend: %s", a.unwanted)
	}
	return a.share == 0, nil
}

const (
	drainEvery  = 50 * time.Millisecond
	drainAtOnce = 64              // sessions under way at once
	drainAgain  = 2 * time.Second // before a member is asked again
)

// drainStep requests the move of some remaining sessions, sessions without a request first.
func (a *Agent) drainStep(ctx context.Context) (Drained, error) {
	d := Drained{Backend: a.o.Name}
	r, err := handoff.Status(ctx, a.o.Keeper)
	if err != nil {
		return d, err
	}
	now, moving := time.Now(), 0
	for _, v := range r.Services {
		if a.known.Load().home[v.Name] == nil {
			continue
		}
		var ask []handoff.SessionReport
		for _, s := range v.Sessions {
			if s.Kind != wire.Stream.String() {
				continue
			}
			d.Left++
			if wire.Elsewhere(s.Member) || s.PID == 0 || a.asked.moves(s, now) {
				moving++
				continue
			}
			ask = append(ask, s)
		}
		slices.SortStableFunc(ask, func(x, y handoff.SessionReport) int { return a.asked.when(x).Compare(a.asked.when(y)) })
		for _, s := range ask {
			if moving >= drainAtOnce {
				break
			}
			switch err := a.askToMove(ctx, v, s); {
			case errors.Is(err, wire.ErrUnable):
				d.Immobile++
				d.Left--
			case err != nil:
				d.Reason = err.Error()
			default:
				moving++
			}
		}
	}
	if d.Others, d.Unnamed, err = a.others(r); err != nil {
		return d, err
	}
	_, d.Asked = a.asked.count()
	d.Blocked = a.blocked(r, now)
	a.tellBlocked(d.Blocked)
	return d, nil
}

// others counts the connections to the services' addresses that cannot move. They are unknown to the keeper, or
// belong to services unknown to the load balancer. The latter are also counted by service.
func (a *Agent) others(r handoff.Report) (n int, unnamed map[string]int, err error) {
	sockets, err := a.sockets(a.listens())
	if err != nil {
		return 0, nil, err
	}
	entries, err := a.quarantine.Entries()
	if err != nil {
		return 0, nil, err
	}
	moving := map[repair.Flow]bool{}
	for _, e := range entries {
		moving[e.Flow] = e.State != quarantine.Pass
	}
	service := map[string]string{} // by session number at the keeper
	for _, v := range r.Services {
		for _, s := range v.Sessions {
			service[s.ID] = v.Name
		}
	}
	home := a.known.Load().home
	unnamed = map[string]int{}
	for f, s := range sockets {
		ended := s.Inode == 0 && s.State == sockdiag.FinWait2 // closed by its program, and all data has arrived
		name, kept := service[strconv.FormatUint(s.Cookie, 10)]
		if ended || moving[f] || kept && home[name] != nil {
			continue
		}
		n++
		if kept {
			unnamed[name]++
		}
	}
	return n, unnamed, nil
}

var errNoServer = errors.New("no connected backend has a member for it")

// askToMove requests a session's member to move it to another backend.
func (a *Agent) askToMove(ctx context.Context, v handoff.ServiceReport, s handoff.SessionReport) error {
	err := errNoServer
	if to := a.leastLoaded(v); to != "" {
		var id uint64
		if id, err = strconv.ParseUint(s.ID, 10, 64); err == nil {
			err = handoff.Send(ctx, a.o.Keeper, v.Name, s.Member, id, to)
		}
	}
	a.asked.add(s, err)
	return err
}

// leastLoaded returns the way to the backend with the fewest sessions sent to it. It skips closed ways, and backends
// without a member.
func (a *Agent) leastLoaded(v handoff.ServiceReport) string {
	best, least := "", uint64(math.MaxUint64)
	for _, m := range v.Members {
		name, elsewhere := strings.CutPrefix(m.Name, "@")
		if !elsewhere || !m.Ready || name == a.o.Name {
			continue
		}
		i := slices.IndexFunc(a.sortedLinks(), func(k *link) bool { return k.to.Name == name })
		if i < 0 {
			continue
		}
		k := a.sortedLinks()[i]
		if none, _ := k.none.Load(a.known.Load().number(v.Name)); none == true {
			continue
		}
		if n := k.sent.Load(); n < least {
			best, least = m.Name, n
		}
	}
	for _, k := range a.sortedLinks() {
		if "@"+k.to.Name == best {
			k.sent.Add(1)
		}
	}
	return best
}
