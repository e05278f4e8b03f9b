// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/kernel"
)

// State is what the pins say.
type State struct {
	Sessions  []SessionState `json:"sessions"`
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
	Problem      string        `json:"problem,omitempty"`
}

// published is what a namespace's engine has recorded.
type published struct {
	Config Config `json:"config"`
	Netns  string `json:"netns"`
	Inode  uint64 `json:"inode"`
	// Discriminators of sessions, by name.
	Discriminators map[string]uint32 `json:"discriminators,omitempty"`
}

// managed says that a configuration of this package made it.
func (p *published) managed() bool { return p.Inode != 0 }

// readPublished returns what is recorded, by scope; engines of others are left out.
func readPublished(r *kernel.Root) (map[string]published, map[string]engine.Published, error) {
	all, err := engine.All(r)
	if err != nil {
		return nil, nil, err
	}
	out, engines := map[string]published{}, map[string]engine.Published{}
	for _, e := range all {
		var p published
		if err := json.Unmarshal(e.Text, &p); err != nil {
			return nil, nil, fmt.Errorf("BFD of namespace %s: %w", e.Scope, err)
		}
		if p.managed() {
			out[e.Scope], engines[e.Scope] = p, e
		}
	}
	return out, engines, nil
}

// ReadState reads sessions from their pins alone. Those that bfdd hands over are not among them: vtysh shows them.
func ReadState(r *kernel.Root) (State, error) {
	all, engines, err := readPublished(r)
	st := State{published: all}
	if err != nil {
		return st, err
	}
	for scope, p := range all {
		found, err := engines[scope].Sessions(r)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			return st, err
		}
		now := monotonic()
		for _, s := range p.Config.Sessions {
			st.Sessions = append(st.Sessions, p.state(s, found, now))
		}
	}
	slices.SortFunc(st.Sessions, func(a, b SessionState) int {
		return strings.Compare(a.Netns+"\x00"+a.Name, b.Netns+"\x00"+b.Name)
	})
	return st, nil
}

func (p *published) state(s Session, found map[uint32]engine.Status, now time.Duration) SessionState {
	out := SessionState{Name: s.Name, Netns: p.Netns, Device: s.Device, Peer: s.Peer, State: bfd.Down}
	x, there := found[p.Discriminators[s.Name]]
	if !there {
		out.Problem = fmt.Sprintf("it waits for the device %s and its address", s.Device)
		return out
	}
	out.State, out.Remote, out.Diag, out.Interval, out.Detection = x.State, x.Remote.State, x.Diag, x.Interval, x.Detection
	out.Since = now - x.Since
	if x.Heard != 0 {
		out.Heard = now - x.Heard
	}
	out.Ups, out.Downs, out.In, out.Out, out.NotAuthentic, out.Malformed = x.Ups, x.Downs, x.In, x.Out, x.NotAuthentic, x.Malformed
	return out
}

// monotonic is CLOCK_MONOTONIC, which programs go by.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return time.Duration(ts.Nano())
}
