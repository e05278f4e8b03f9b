// SPDX-License-Identifier: Apache-2.0

package reroutestress

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/ethtool"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// Metrics of weir.
const (
	metricMaster  = "false_downs_master"
	metricPeer    = "false_downs_peer"
	metricMaster5 = "false_downs_master_5x3"
	metricPeer5   = "false_downs_peer_5x3"
	metricBFD     = "false_downs_bfd_10x3" // of weir's sessions at both ends
)

// world is two routers, a probing and a probed one, with links between them: weir's, and bfdd's. BIRD has
// two separate ones, because two BFD daemons cannot share the port in one namespace.
type world struct {
	env           *lab.Env
	root          *kernel.Root
	near, far     *netns.Handle
	nearNS, farNS string
	bird          [2]*netns.Handle
	birdNS        [2]string
	floodNS       string // namespace of a flood
	key           string
	serve         *lab.Process
}

// link is one of the parallel links, by its number.
type link int

const (
	link10 link = iota
	link5
	linkFRR
	linkBIRD
	linkBFD
	linkMany
)

func (l link) device() string { return fmt.Sprintf("link%d", l) }

// addr returns the address of an end: 1 is the near one, 2 the far one.
func (l link) addr(end int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::%d", l+1, end))
}

func (l link) addr4(end int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("10.99.%d.%d", l+1, end))
}

// function returns the segment of an end of the link.
func (l link) function() netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fc00:2:%d::bf", l+1)) }

func newWorld(e *lab.Env) (w *world, err error) {
	if err := kernel.Require(liveness.Needs(liveness.Config{Sessions: []liveness.Session{{Mode: liveness.Active}}})); err != nil {
		return nil, err
	}
	w = &world{env: e, root: kernel.OpenRoot(e.Root)}
	if w.near, w.nearNS, err = e.Namespace("near"); err != nil {
		return nil, err
	}
	if w.far, w.farNS, err = e.Namespace("far"); err != nil {
		return nil, err
	}
	if _, w.floodNS, err = e.Namespace("flood"); err != nil {
		return nil, err
	}
	for i, name := range []string{"near-bird", "far-bird"} {
		if w.bird[i], w.birdNS[i], err = e.Namespace(name); err != nil {
			return nil, err
		}
	}
	for _, ns := range []*netns.Handle{w.near, w.far} {
		if err := topo.Sysctl(ns, "net.ipv6.conf.all.forwarding", "1"); err != nil {
			return nil, err
		}
	}
	for l := range linkMany + 1 {
		if err := w.cable(l); err != nil {
			return nil, err
		}
	}
	key := make([]byte, 16)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	w.key = filepath.Join(e.Dir, "key")
	return w, os.WriteFile(w.key, key, 0o600)
}

// cable creates a link with a separate queue at each end, like network cards, for weir and the others
// alike. veth's default is the CPU's single backlog, where a flood on any device drops all other packets.
func (w *world) cable(l link) error {
	ends := [2]topo.End{{NS: w.near}, {NS: w.far}}
	if l == linkBIRD {
		ends = [2]topo.End{{NS: w.bird[0]}, {NS: w.bird[1]}}
	}
	for i := range ends {
		ends[i].Name = l.device()
		ends[i].Addrs = []netip.Prefix{netip.PrefixFrom(l.addr(i+1), 64), netip.PrefixFrom(l.addr4(i+1), 24)}
	}
	if err := topo.Cable(ends[0], ends[1]); err != nil {
		return err
	}
	for _, e := range ends {
		err := e.NS.Do(func() error {
			return errors.Join(ethtool.Set(e.Name, unix.ETHTOOL_STSO, false), ethtool.Set(e.Name, unix.ETHTOOL_SGRO, true))
		})
		if err != nil {
			return fmt.Errorf("set the offloads of %s: %w", e.Name, err)
		}
	}
	return nil
}

// session returns a session of a link, seen from both ends.
func (w *world) session(name string, id uint32, l link, interval time.Duration) (near, far liveness.Session) {
	near = liveness.Session{Name: name, ID: id, Mode: liveness.Sender, Device: l.device(), Peer: l.function(), Via: l.addr(2), Source: l.addr(1),
		Interval: interval, Multiplier: 3, KeyFile: w.key, StableFor: 100 * time.Millisecond, StableMax: time.Second}
	far = liveness.Session{Name: name, ID: id, Mode: liveness.Passive, Device: l.device(), Function: l.function(), Interval: interval, Multiplier: 3,
		KeyFile: w.key, StableFor: near.StableFor, StableMax: near.StableMax}
	return near, far
}

// cpus returns the CPUs of an end's loops. The first loop of a session is on another CPU than at the other
// end.
func cpus(shift int) ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	var all []int
	for cpu := 0; len(all) < min(set.Count(), 16); cpu++ {
		if set.IsSet(cpu) {
			all = append(all, cpu)
		}
	}
	shift %= len(all)
	return append(append([]int{}, all[shift:]...), all[:shift]...), nil
}

// configure sets up weir to probe both of its links, and starts the supervising process.
func (w *world) configure(ctx context.Context) error {
	near10, far10 := w.session("10x3", 1, link10, 10*time.Millisecond)
	near5, far5 := w.session("5x3", 2, link5, 5*time.Millisecond)
	if err := w.apply(ctx, w.nearNS, 0, near10, near5); err != nil {
		return err
	}
	if err := w.apply(ctx, w.farNS, 1, far10, far5); err != nil {
		return err
	}
	if err := w.applyBFD(ctx); err != nil {
		return err
	}
	w.env.OnClose(func() {
		l, err := w.root.Lock(context.Background())
		if err != nil {
			return
		}
		defer l.Unlock()
		_ = peers.Remove(context.Background(), l)
		_ = liveness.Remove(context.Background(), l) // the rest ends with the namespaces
	})
	p, err := w.env.Start(lab.Command{Path: w.env.Self(), Args: []string{serveArg, w.env.Root}})
	w.serve = p
	return err
}

func (w *world) apply(ctx context.Context, ns string, shift int, sessions ...liveness.Session) error {
	order, err := cpus(shift)
	if err != nil {
		return err
	}
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	st, err := liveness.ReadState(ctx, w.root)
	if err != nil {
		return err
	}
	p, err := liveness.Plan(ctx, st, liveness.Config{Netns: ns, Sessions: sessions, CPUs: order})
	if err != nil {
		return err
	}
	return liveness.Apply(ctx, l, p)
}

// applyBFD makes both ends run a BFD session, 10 ms × 3.
func (w *world) applyBFD(ctx context.Context) error {
	end := func(ns string, peer int) peers.Config {
		return peers.Config{Netns: ns, Sessions: []peers.Session{{Name: "bfd", Device: linkBFD.device(), Peer: linkBFD.addr4(peer),
			Interval: 10 * time.Millisecond, Multiplier: 3}}}
	}
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	st, err := peers.ReadState(w.root)
	if err != nil {
		return err
	}
	p, err := peers.Plan(ctx, st, []peers.Config{end(w.nearNS, 2), end(w.farNS, 1)})
	if err != nil {
		return err
	}
	for _, s := range p.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// downMetric returns the metric of a session's downs.
func downMetric(s liveness.SessionState) (name string, j *liveness.Judgement) {
	switch {
	case s.Name == "10x3" && s.Sender != nil:
		return metricMaster, s.Sender
	case s.Name == "10x3":
		return metricPeer, s.Peer
	case s.Name == "5x3" && s.Sender != nil:
		return metricMaster5, s.Sender
	case s.Name == "5x3":
		return metricPeer5, s.Peer
	}
	return "", nil
}

// downs returns the downs of each side so far.
func (w *world) downs(ctx context.Context) (map[string]float64, error) {
	st, err := liveness.ReadState(ctx, w.root)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for _, s := range st.Sessions {
		if name, j := downMetric(s); name != "" {
			out[name] += float64(j.Downs)
		}
	}
	if len(out) != 4 {
		return nil, fmt.Errorf("weir shows %d verdicts, want 4", len(out))
	}
	b, err := peers.ReadState(w.root)
	if err != nil {
		return nil, err
	}
	if len(b.Sessions) != 2 {
		return nil, fmt.Errorf("weir shows %d BFD sessions, want 2", len(b.Sessions))
	}
	for _, s := range b.Sessions {
		out[metricBFD] += float64(s.Downs)
	}
	return out, nil
}

// sent returns the number of probes sent by both sessions.
func (w *world) sent(ctx context.Context) (n uint64, err error) {
	st, err := liveness.ReadState(ctx, w.root)
	for _, s := range st.Sessions {
		n += uint64(s.Sent)
	}
	return n, err
}

// up returns an error for a session of weir not up.
func (w *world) up(ctx context.Context) error {
	st, err := liveness.ReadState(ctx, w.root)
	if err != nil {
		return err
	}
	for _, s := range st.Sessions {
		if s.Phase != liveness.Up {
			return fmt.Errorf("weir: %s", s)
		}
	}
	b, err := peers.ReadState(w.root)
	if err != nil {
		return err
	}
	for _, s := range b.Sessions {
		if s.State != bfd.Up || s.Remote != bfd.Up || s.Detection != 30*time.Millisecond {
			return fmt.Errorf("weir: BFD with %s is %s, detection time %s", s.Peer, s.State, s.Detection)
		}
	}
	return nil
}

// describe describes the state of sessions and loops.
func (w *world) describe(ctx context.Context) (lines []string, err error) {
	st, err := liveness.ReadState(ctx, w.root)
	for _, s := range st.Sessions {
		granted := uint32(0)
		for _, j := range []*liveness.Judgement{s.Sender, s.Peer} {
			if j != nil {
				granted += j.Granted
			}
		}
		lines = append(lines, fmt.Sprintf("%s; sent %d, answered %d, heard %d; a stall delayed a verdict at %d ticks", s, s.Sent, s.Answered, s.Heard, granted))
	}
	for _, l := range st.TimerLoops {
		lines = append(lines, fmt.Sprintf("loop of CPU %d in %s: %d ticks, %d late, at most by %s, revived %d times", l.CPU, l.Netns, l.Ticks, l.Stalls, l.Longest, l.Revivals))
	}
	return lines, err
}
