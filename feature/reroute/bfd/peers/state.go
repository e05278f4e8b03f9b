// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// State is what the pins say.
type State struct {
	Sessions   []SessionState       `json:"sessions"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	published map[string]published
}

// SessionState is one session.
type SessionState struct {
	Name   string     `json:"name"`
	Netns  string     `json:"netns"`
	Device string     `json:"device"`
	Peer   netip.Addr `json:"peer"`
	State  bfd.State  `json:"state"`
	Remote bfd.State  `json:"remote_state"` // as the peer last said
	Diag   bfd.Diag   `json:"diag"`
	// Since is for how long it has been in this state, Heard how long ago the last packet came; 0: none did.
	Since        time.Duration `json:"since"`
	Heard        time.Duration `json:"heard"`
	Interval     time.Duration `json:"interval"`  // between packets that it sends; 0: it sends none
	Detection    time.Duration `json:"detection"` // how long nothing may come; 0: nothing is expected
	Ups          uint64        `json:"ups"`
	Downs        uint64        `json:"downs"`
	In           uint64        `json:"in"` // packets
	Out          uint64        `json:"out"`
	NotAuthentic uint64        `json:"not_authentic"` // packets that were, and changed nothing
	Malformed    uint64        `json:"malformed"`
	Echo         *Echo         `json:"echo,omitempty"` // nil: none is wanted, and none was sent
	Problem      string        `json:"problem,omitempty"`
	Gone         bool          `json:"gone,omitempty"` // the network namespace
	// FRR is where the bfdd is that handed it over; its name is that of the path whose link it
	// judges, else frr:PEER%INTERFACE. "": it is of the configuration.
	FRR string `json:"frr,omitempty"`
	// Unjudged says that there is no such session, though a path's link is to be judged by it: nobody judges the link.
	Unjudged bool `json:"unjudged,omitempty"`

	// Keyless says that it is of the configuration, and without a key.
	Keyless bool `json:"keyless,omitempty"`

	again bool // its device was made again
}

// Echo is a session's echo function.
type Echo struct {
	Interval time.Duration `json:"interval"` // between packets; 0: none are sent, as long as the neighbour does not say that it loops them back
	RTT      time.Duration `json:"rtt"`      // smoothed
	Sent     uint64        `json:"sent"`
	Returned uint64        `json:"returned"`
	Refused  uint64        `json:"refused"` // that claimed to be ours
	Failed   bool          `json:"failed"`  // as many as the multiplier did not come back, and none since
	Failures uint64        `json:"failures"`
}

// published is what a namespace's engine has recorded.
type published struct {
	Config Config `json:"config"`
	Netns  string `json:"netns"`
	netns.ID
	// Discriminators of sessions, by name.
	Discriminators map[string]uint32 `json:"discriminators,omitempty"`
}

// managed says that a configuration of this package made it.
func (p *published) managed() bool { return p.Inode != 0 }

// readPublished returns what is recorded, by scope; engines of others are left out.
func readPublished(r *kernel.Root) (map[string]published, map[string]engine.Published, instances.Unreadable, error) {
	all, unreadable, err := engine.All(r)
	if err != nil {
		return nil, nil, nil, err
	}
	out, engines := map[string]published{}, map[string]engine.Published{}
	for _, e := range all {
		var p published
		if err := json.Unmarshal(e.Text, &p); err != nil {
			unreadable.Add(e.Instance(), err)
			continue
		}
		if p.managed() {
			p.ID = e.ID
			out[e.Scope], engines[e.Scope] = p, e
		}
	}
	return out, engines, unreadable, nil
}

func (p *published) scope() string { return strconv.FormatUint(p.Inode, 10) }

// handedText is what the pins of sessions that bfdd hands over say of themselves.
type handedText struct {
	FRR   string `json:"frr"`
	Netns string `json:"netns"`
	Inode uint64 `json:"inode"`
}

func (p *published) handed() handedText { return handedText{p.Config.FRR, p.Netns, p.Inode} }

// silent is how long after their last tick nobody runs bfdd's sessions any more: this host may stand still meanwhile.
const silent = 2 * time.Second

// readHanded reads the sessions of bfdd that are run; known is what is configured, by scope.
func readHanded(r *kernel.Root, known map[string]published, yield func(scope string, s SessionState)) (instances.Unreadable, error) {
	all, unreadable, err := engine.AllHanded(r)
	if err != nil {
		return nil, err
	}
	for _, e := range all {
		var h handedText
		if err := json.Unmarshal(e.Text, &h); err != nil {
			unreadable.Add(e.Instance(), err)
			continue
		}
		beat, err := e.Tick(r)
		var found map[uint32]engine.Status
		var ids map[uint32]engine.Identity
		var owners map[uint32]engine.Owner
		if now := time.Duration(kernel.Monotonic()); err == nil && now-beat < silent {
			found, err = e.Sessions(r)
			if err == nil {
				ids, err = e.Identities(r)
			}
			if err == nil {
				owners, err = e.Owners(r)
			}
		}
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			unreadable.Add(e.Instance(), err)
			continue
		}
		now, config := time.Duration(kernel.Monotonic()), known[e.Scope].Config
		for d, st := range found {
			out := SessionState{Netns: h.Netns, Device: owners[d].Device, Peer: ids[d].Peer, FRR: h.FRR}
			if out.Name = config.judged(out.Device, out.Peer); out.Name == "" {
				out.Name = fmt.Sprintf("frr:%s%%%s", out.Peer, out.Device)
			}
			out.of(st, now)
			yield(e.Scope, out)
		}
	}
	return unreadable, nil
}

// ReadState reads sessions from their pins alone.
func ReadState(r *kernel.Root) (State, error) {
	all, engines, unreadable, err := readPublished(r)
	st := State{published: all, Unreadable: unreadable}
	if err != nil {
		return st, err
	}
	for scope, p := range all {
		found, err := engines[scope].Sessions(r)
		var ids map[uint32]engine.Identity
		if err == nil {
			ids, err = engines[scope].Identities(r)
		}
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			st.Unreadable.Add(engines[scope].Instance(), err)
			delete(all, scope)
			continue
		}
		now, gone, devices := time.Duration(kernel.Monotonic()), p.gone(), p.devices()
		for _, s := range p.Config.Sessions {
			out := p.state(s, found, now)
			if gone != "" {
				out.State, out.Problem, out.Gone = bfd.Down, gone, true
			} else if id, there := ids[p.Discriminators[s.Name]]; there && devices != nil {
				out.Problem, out.again = links.DeviceProblem(devices, s.Device, id.Ifindex)
			}
			st.Sessions = append(st.Sessions, out)
		}
	}
	there := map[[2]string]bool{} // by scope and name
	handed, err := readHanded(r, all, func(scope string, s SessionState) {
		there[[2]string{scope, s.Name}] = true
		st.Sessions = append(st.Sessions, s)
	})
	st.Unreadable = append(st.Unreadable, handed...)
	if err == nil && len(handed) == 0 {
		for scope, p := range all {
			st.Sessions = append(st.Sessions, p.unjudged(func(name string) bool { return there[[2]string{scope, name}] })...)
		}
	}
	slices.SortFunc(st.Sessions, func(a, b SessionState) int {
		return cmp.Or(strings.Compare(a.Netns, b.Netns), strings.Compare(a.FRR, b.FRR), strings.Compare(a.Name, b.Name), strings.Compare(a.Device, b.Device))
	})
	return st, err
}

// unjudged returns the links that no session of bfdd judges, though the configuration says so.
func (p *published) unjudged(there func(name string) bool) (out []SessionState) {
	for _, j := range p.Config.Evaluated {
		if there(j.Name) || p.gone() != "" {
			continue
		}
		out = append(out, SessionState{Name: j.Name, Netns: p.Netns, Device: j.Device, Peer: j.Peer, State: bfd.Down, FRR: p.Config.FRR, Unjudged: true,
			Problem: fmt.Sprintf("nobody judges link %s: bfdd at %s has handed over no session with %s, or weir serve does not run", j.Device, p.Config.FRR, j.Peer)})
	}
	return out
}

// gone says that the network namespace is gone, and its sessions with it; "": it is there, or nobody knows.
func (p *published) gone() string {
	ns, err := netns.Find(p.Netns, p.ID)
	if err == nil {
		ns.Close()
	} else if errors.Is(err, netns.ErrGone) {
		return err.Error()
	}
	return ""
}

// devices are the interfaces of the network namespace, nil where this user may not see them.
func (p *published) devices() (out map[string]int) {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return nil
	}
	defer ns.Close()
	_ = ns.Do(func() (err error) { out, err = links.Devices(); return err })
	return out
}

func (p *published) state(s Session, found map[uint32]engine.Status, now time.Duration) SessionState {
	out := SessionState{Name: s.Name, Netns: p.Netns, Device: s.Device, Peer: s.Peer, State: bfd.Down, Keyless: s.KeyFile == ""}
	x, there := found[p.Discriminators[s.Name]]
	if !there {
		out.Problem = fmt.Sprintf("it waits for the device %s and an address of it in the network of %s", s.Device, s.Peer)
		return out
	}
	out.of(x, now)
	if s.Echo != 0 && out.Echo == nil {
		out.Echo = &Echo{}
	}
	return out
}

func (out *SessionState) of(x engine.Status, now time.Duration) {
	out.State, out.Remote, out.Diag, out.Interval, out.Detection = x.State, x.Remote.State, x.Diag, x.Interval, x.Detection
	out.Since = now - x.Since
	if x.Heard != 0 {
		out.Heard = now - x.Heard
	}
	if e := x.Echo; e.Interval != 0 || e.Sent != 0 {
		out.Echo = &Echo{Interval: e.Interval, RTT: e.RTT, Sent: e.Sent, Returned: e.Returned, Refused: e.Refused, Failed: e.Failed, Failures: e.Failures}
	}
	out.Ups, out.Downs, out.In, out.Out, out.NotAuthentic, out.Malformed = x.Ups, x.Downs, x.In, x.Out, x.NotAuthentic, x.Malformed
}

// Saved is the BFD of one network namespace, for putting it back later.
type Saved struct {
	netns.ID
	Config Config `json:"config"`
}

// Saved returns BFD as it is pinned.
func (st State) Saved() (out []Saved) {
	for _, scope := range slices.Sorted(maps.Keys(st.published)) {
		out = append(out, Saved{st.published[scope].ID, st.published[scope].Config})
	}
	return out
}
