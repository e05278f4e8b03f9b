// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Phase is the result of a session.
type Phase string

// Phases. A session without any packet from the peer is not down: its link stays in use.
const (
	Init Phase = "init"
	Up   Phase = "up"
	Down Phase = "down"
)

var phases = []Phase{Init, Up, Down}

// LIVENESS_UP and LIVENESS_DOWN of liveness.h.
const (
	phaseUp   = 1
	phaseDown = 2
)

// Direction is the state of one direction of a link.
type Direction string

// Directions. A direction is unknown if only the peer could tell and its packets do not arrive.
const (
	Works   Direction = "up"
	Broken  Direction = "down"
	Unknown Direction = "unknown"
)

// State is the liveness of this host as read from the pins.
type State struct {
	Sessions   []SessionState   `json:"sessions"`
	TimerLoops []TimerLoopState `json:"timer_loops"`
	// UnknownSources counts packets without a known session, by reason.
	UnknownSources map[string]uint64 `json:"unknown_sources,omitempty"`

	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	published map[string]published // by scope
}

// Judgement is the verdict of one side of a session.
type Judgement struct {
	Phase   Phase         `json:"phase"`
	For     time.Duration `json:"for"`     // time in this phase
	Downs   uint32        `json:"downs"`   // since the session was configured
	Granted uint32        `json:"granted"` // ticks at which a stall of this host delayed a verdict
}

// SessionState is the state of one session.
type SessionState struct {
	Name   string `json:"name"`
	Netns  string `json:"netns"`
	Device string `json:"device"`
	ID     uint32 `json:"id"`
	Mode   Mode   `json:"mode"`
	Phase  Phase  `json:"phase"`
	// Sender is the judgement by answers to our probes, Peer by the peer's probes; nil if the mode has none.
	Sender *Judgement `json:"sender,omitempty"`
	Peer   *Judgement `json:"peer,omitempty"`
	Out    Direction  `json:"out"` // towards the peer
	In     Direction  `json:"in"`
	Flaps  uint32     `json:"flaps"` // number of down verdicts of both judgements
	// Kept reports a down verdict from before the peer ended its session, or from before this session was changed.
	// The peer has sent nothing since.
	Kept bool `json:"kept,omitempty"`

	Sent       uint32 `json:"sent"` // probes; wraps around
	Answered   uint32 `json:"answered"`
	Unanswered uint32 `json:"unanswered"` // probes sent since the last answered one
	LostOut    uint32 `json:"lost_out"`   // probes lost before the peer, as of its last answer
	LostIn     uint32 `json:"lost_in"`    // answers lost on the way back
	Heard      uint32 `json:"heard"`      // probes of the peer's current incarnation
	LostHeard  uint32 `json:"lost_heard"` // lost probes of it

	RTT    RTT               `json:"rtt"`
	Counts map[string]uint64 `json:"counts,omitempty"` // ignored packets, by reason

	Problem string `json:"problem,omitempty"`
	Gone    bool   `json:"gone,omitempty"` // the network namespace is gone

	again bool // its device was recreated, or appeared later
}

// RTT summarizes round-trip times. Percentiles are upper ends of buckets a quarter of a power of two wide.
type RTT struct {
	Min    time.Duration `json:"min"`
	P50    time.Duration `json:"p50"`
	P99    time.Duration `json:"p99"`
	Jitter time.Duration `json:"jitter"` // RFC 3550 section 6.4.1
}

// TimerLoopState is one loop of a tick source.
type TimerLoopState struct {
	Netns    string        `json:"netns"`
	CPU      int           `json:"cpu"` // wanted CPU
	On       uint32        `json:"on"`  // CPU of the last tick
	Ticks    uint64        `json:"ticks"`
	Silent   time.Duration `json:"silent"`   // since its last tick
	Stalls   uint64        `json:"stalls"`   // ticks more than 1.5 ms late
	Longest  time.Duration `json:"longest"`  // longest of them
	Revivals uint32        `json:"revivals"` // reseeds by another loop after the loss of its packet
	Spent    time.Duration `json:"spent"`    // in ticks
}

// reasons follows enum liveness_count.
var reasons = []string{"forged", "stale", "duplicate", "malformed", "far", "elsewhere", "unknown", "unsent"}

// ReadState reads liveness from its pins.
func ReadState(_ context.Context, r *kernel.Root) (State, error) {
	st := State{published: map[string]published{}, UnknownSources: map[string]uint64{}}
	all, unreadable, err := store.All(r)
	st.Unreadable = unreadable
	for _, rec := range all {
		p := publishedFrom(rec)
		err := st.readScope(r, rec.Scope, p)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			st.Unreadable.Add(rec.Instance, err)
			continue
		}
		st.published[rec.Scope] = p
	}
	return st, err
}

func (st *State) readScope(r *kernel.Root, scope string, p published) error {
	o, err := r.Open(instance(scope), pinSetups, pinStates, pinClockwork, pinBeats, pinCounts)
	if err != nil {
		return err
	}
	defer o.Close()
	problem, gone, routes := "", false, map[string]string{}
	var devices map[string]int // nil: this user may not read them
	if ns, err := netns.Find(p.Netns, p.ID); err != nil {
		problem, gone = err.Error(), errors.Is(err, netns.ErrGone)
	} else {
		_ = ns.Do(func() (err error) { // without permission to enter the namespace, the rest remains
			if devices, err = links.Devices(); err != nil {
				return err
			}
			for i := range p.Config.Sessions {
				routes[p.Config.Sessions[i].Name] = routeProblem(&p.Config.Sessions[i])
			}
			return nil
		})
		ns.Close()
	}
	at := kernel.Monotonic()
	for _, s := range p.Config.Sessions {
		s = s.filled()
		var c bpf.LivenessLivenessSetup
		v := &bpf.LivenessLivenessState{}
		i := p.Indexes[s.Name]
		if err := errors.Join(o.Maps[pinSetups].Lookup(i, &c), o.Maps[pinStates].Lookup(i, v)); err != nil {
			return fmt.Errorf("reading session %q: %w", s.Name, err)
		}
		ss := newSessionState(s, c, v, at)
		ss.Netns, ss.Problem, ss.Gone = p.Netns, problem, gone
		used := 0
		if c.On != 0 {
			used = int(c.Ifindex)
		}
		switch {
		case problem != "":
		case devices != nil:
			ss.Problem, ss.again = links.DeviceProblem(devices, s.Device, used)
			ss.Problem = cmp.Or(ss.Problem, routes[s.Name])
		case used == 0:
			ss.Problem = fmt.Sprintf("there is no interface %s", s.Device)
		}
		st.Sessions = append(st.Sessions, ss)
	}
	for i, reason := range reasons {
		var each []uint64
		if err := o.Maps[pinCounts].Lookup(uint32(i), &each); err != nil {
			return fmt.Errorf("reading counts: %w", err)
		}
		for _, n := range each {
			if n > 0 {
				st.UnknownSources[reason] += n
			}
		}
	}
	if gone {
		return nil // its loops have ended
	}
	return st.readLoops(o, p, at)
}

func (st *State) readLoops(o *kernel.Opened, p published, at uint64) error {
	cpus, err := loopCPUs(p.Config.CPUs)
	if err != nil {
		return err
	}
	var m bpf.LivenessLivenessTickSource
	if err := o.Maps[pinClockwork].Lookup(uint32(0), &m); err != nil {
		return fmt.Errorf("reading the tick source: %w", err)
	}
	for i := range m.Loops {
		var b bpf.LivenessLivenessBeat
		if err := o.Maps[pinBeats].Lookup(i, &b); err != nil {
			return fmt.Errorf("reading the timer loops: %w", err)
		}
		l := TimerLoopState{Netns: p.Netns, On: b.Cpu, Ticks: b.Ticks, Silent: since(at, b.Beat), Stalls: b.Stalls,
			Longest: time.Duration(b.Longest), Revivals: b.Revivals, Spent: time.Duration(b.Spent), CPU: -1}
		if int(i) < len(cpus) {
			l.CPU = cpus[i]
		}
		st.TimerLoops = append(st.TimerLoops, l)
	}
	return nil
}

// since returns the time from a moment to at. It returns 0 for a later moment, because another CPU may write
// meanwhile.
func since(at, moment uint64) time.Duration { return time.Duration(at - min(at, moment)) }

func newJudgement(j bpf.LivenessLivenessJudgement, at uint64) *Judgement {
	out := &Judgement{Phase: Init, Downs: j.Downs, Granted: j.Granted}
	if int(j.Phase) < len(phases) {
		out.Phase = phases[j.Phase]
	}
	if j.Since != 0 {
		out.For = since(at, j.Since)
	}
	return out
}

func newSessionState(s Session, c bpf.LivenessLivenessSetup, v *bpf.LivenessLivenessState, at uint64) SessionState {
	out := SessionState{Name: s.Name, Device: s.Device, ID: s.ID, Mode: s.Mode, Phase: Init, Flaps: v.Sender.Downs + v.Peer.Downs,
		Sent: v.Seq, Answered: v.Answers, Unanswered: v.Seq - v.Answered, Heard: v.Heard, LostHeard: v.PeerSeq - min(v.PeerSeq, v.Heard),
		RTT: newRTT(v), Counts: map[string]uint64{}}
	if s.sends() {
		out.Sender = newJudgement(v.Sender, at)
	}
	if s.judges() {
		out.Peer = newJudgement(v.Peer, at)
	}
	for _, j := range []*Judgement{out.Sender, out.Peer} {
		if j != nil && (j.Phase == Down || j.Phase == Up && out.Phase == Init) {
			out.Phase = j.Phase
		}
	}
	out.Kept = out.Phase == Down && v.Answers == 0 && v.LastFresh == 0
	if s.sends() && s.Mode != Echo && v.Answers > 0 {
		out.LostOut = v.Answered - min(v.Answered, v.PeerHeard)
		out.LostIn = v.PeerHeard - min(v.PeerHeard, v.Answers)
	}
	for i, reason := range reasons {
		if v.Counts[i] > 0 {
			out.Counts[reason] = v.Counts[i]
		}
	}
	out.Out, out.In = directions(s, c, v, at)
	return out
}

// directions derives the state of both directions. Answers prove both. The peer's own probes prove the way in, and
// their acknowledgements the way out.
func directions(s Session, c bpf.LivenessLivenessSetup, v *bpf.LivenessLivenessState, at uint64) (out, in Direction) {
	window := time.Duration(c.Interval) * time.Duration(s.Multiplier+1)
	if v.PeerInterval != 0 {
		window = max(window, time.Duration(v.PeerInterval)*time.Duration(v.PeerMultiplier+1))
	}
	recent := func(moment uint64) bool { return moment != 0 && since(at, moment) < window }
	answered, probed := recent(v.LastAnswer), recent(v.LastSeen)
	out, in = Unknown, Unknown
	if answered || probed {
		in = Works
	} else if s.judges() && v.LastSeen != 0 {
		in = Broken
	}
	if answered || recent(v.LastFresh) || recent(v.LastHears) {
		out = Works
	} else if probed {
		out = Broken
	}
	return out, in
}

// newRTT reads the histogram (liveness_bucket in heard.h).
func newRTT(v *bpf.LivenessLivenessState) RTT {
	out := RTT{Min: time.Duration(v.RttMin), Jitter: time.Duration(v.Jitter)}
	total := uint64(0)
	for _, n := range v.Rtt {
		total += uint64(n)
	}
	quantile := func(q float64) time.Duration {
		left := uint64(q * float64(total))
		for i, n := range v.Rtt {
			if left < uint64(n) {
				return bucketEnd(i)
			}
			left -= uint64(n)
		}
		return 0
	}
	if total > 0 {
		out.P50, out.P99 = quantile(0.5), quantile(0.99)
	}
	return out
}

// bucketEnd returns the longest round trip of a bucket.
func bucketEnd(i int) time.Duration {
	return time.Duration(uint64(5+i%4) << (8 + i/4))
}

// String formats the session on one line.
func (s SessionState) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s on %s: out %s, in %s, %d flaps, rtt %s/%s", s.Name, s.Phase, s.Device, s.Out, s.In, s.Flaps, s.RTT.P50, s.RTT.P99)
	return b.String()
}

// Saved is the liveness of one network namespace for a later restore.
type Saved struct {
	netns.ID
	Config Config `json:"config"`
}

// Saved returns the pinned liveness.
func (st State) Saved() (out []Saved) {
	for _, scope := range slices.Sorted(maps.Keys(st.published)) {
		out = append(out, Saved{st.published[scope].ID, st.published[scope].Config})
	}
	return out
}
