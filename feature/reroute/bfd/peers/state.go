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

// State is the BFD of this host as read from the pins.
type State struct {
	Sessions   []SessionState       `json:"sessions"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	published map[string]published
}

// SessionState is the state of one session.
type SessionState struct {
	Name   string     `json:"name"`
	Netns  string     `json:"netns"`
	Device string     `json:"device"`
	Peer   netip.Addr `json:"peer"`
	State  bfd.State  `json:"state"`
	Remote bfd.State  `json:"remote_state"` // last state reported by the peer
	Diag   bfd.Diag   `json:"diag"`
	// Since is the time in this state. Heard is the time since the last packet; 0: none yet.
	Since        time.Duration `json:"since"`
	Heard        time.Duration `json:"heard"`
	Interval     time.Duration `json:"interval"`  // between sent packets; 0: it sends none
	Detection    time.Duration `json:"detection"` // longest accepted silence of the peer; 0: no packets are expected
	Ups          uint64        `json:"ups"`
	Downs        uint64        `json:"downs"`
	In           uint64        `json:"in"` // packets
	Out          uint64        `json:"out"`
	NotAuthentic uint64        `json:"not_authentic"` // rejected packets, as unauthentic
	Malformed    uint64        `json:"malformed"`
	Echo         *Echo         `json:"echo,omitempty"` // nil: neither wanted nor sent
	Problem      string        `json:"problem,omitempty"`
	Gone         bool          `json:"gone,omitempty"` // the network namespace is gone
	// FRR is the address of the bfdd owning the session; "": the session is configured. The name of such a session is
	// the path of the judged link, else frr:PEER%INTERFACE.
	FRR string `json:"frr,omitempty"`
	// Unjudged reports a missing session of bfdd for a path's link: the link has no judge.
	Unjudged bool `json:"unjudged,omitempty"`
	// NoDevice reports that the interface does not exist.
	NoDevice bool `json:"no_device,omitempty"`

	// Keyless reports a configured session without a key.
	Keyless bool `json:"keyless,omitempty"`

	again bool // its device was recreated
}

// Echo is the state of a session's echo function.
type Echo struct {
	Interval time.Duration `json:"interval"` // between packets; 0: none, until the neighbour announces to loop them back
	RTT      time.Duration `json:"rtt"`      // smoothed
	Sent     uint64        `json:"sent"`
	Returned uint64        `json:"returned"`
	Refused  uint64        `json:"refused"` // packets with a wrong identification
	Failed   bool          `json:"failed"`  // multiplier packets in a row were lost, and none has returned since
	Failures uint64        `json:"failures"`
}

// published is the configuration recorded in a namespace's engine.
type published struct {
	Config Config `json:"config"`
	Netns  string `json:"netns"`
	netns.ID
	// Discriminators of sessions, by name.
	Discriminators map[string]uint32 `json:"discriminators,omitempty"`
}

// managed reports whether this package recorded it.
func (p *published) managed() bool { return p.Inode != 0 }

// readPublished returns the recorded configurations and their engines by scope. It omits engines of other packages.
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

// handedText is the text recorded with bfdd's sessions.
type handedText struct {
	FRR   string `json:"frr"`
	Netns string `json:"netns"`
	Inode uint64 `json:"inode"`
}

func (p *published) handed() handedText { return handedText{p.Config.FRR, p.Netns, p.Inode} }

// silent is the time without ticks after which bfdd's sessions count as ended. It allows for stalls of this host.
const silent = 2 * time.Second

// readHanded reads the running sessions of bfdd. known holds the configurations by scope.
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

// ReadState reads sessions from their pins.
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
			out.lacks(devices)
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

// lacks notes a missing interface. devices is nil without permission to see them.
func (s *SessionState) lacks(devices map[string]int) {
	if _, there := devices[s.Device]; !there && devices != nil {
		s.NoDevice, s.Problem = true, fmt.Sprintf("there is no interface %s: nobody judges it until it exists", s.Device)
	}
}

// unjudged returns the links configured for sessions of bfdd, but without one.
func (p *published) unjudged(there func(name string) bool) (out []SessionState) {
	if p.gone() != "" {
		return nil
	}
	devices := p.devices()
	for _, j := range p.Config.Evaluated {
		if there(j.Name) {
			continue
		}
		s := SessionState{Name: j.Name, Netns: p.Netns, Device: j.Device, Peer: j.Peer, State: bfd.Down, FRR: p.Config.FRR, Unjudged: true,
			Problem: fmt.Sprintf("nobody judges link %s: bfdd at %s has handed over no session with %s, or weir serve does not run", j.Device, p.Config.FRR, j.Peer)}
		s.lacks(devices)
		out = append(out, s)
	}
	return out
}

// gone explains why the network namespace is missing; "": it exists, or this is unknown.
func (p *published) gone() string {
	ns, err := netns.Find(p.Netns, p.ID)
	if err == nil {
		ns.Close()
	} else if errors.Is(err, netns.ErrGone) {
		return err.Error()
	}
	return ""
}

// devices returns the interfaces of the network namespace, or nil without permission.
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
		out.Problem = fmt.Sprintf("waiting for device %s with an address in the network of %s", s.Device, s.Peer)
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

// Saved is the BFD of one network namespace for a later restore.
type Saved struct {
	netns.ID
	Config Config `json:"config"`
}

// Saved returns the pinned BFD.
func (st State) Saved() (out []Saved) {
	for _, scope := range slices.Sorted(maps.Keys(st.published)) {
		out = append(out, Saved{st.published[scope].ID, st.published[scope].Config})
	}
	return out
}
