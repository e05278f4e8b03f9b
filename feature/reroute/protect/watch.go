// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/feature/reroute/protect/neigh"
	"github.com/weir-project/weir/feature/reroute/protect/srv6"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Times of the watcher.
const (
	pollInterval = 100 * time.Millisecond // poll of the link states written by liveness, to attach the fast program
	renewEvery   = time.Second            // check for new pins
	quiet        = 50 * time.Millisecond  // delay between a change of routes or links and reconcile
	atLatest     = 5 * time.Second        // upper bound of the delay if reconcile is slow
)

// repeatEvery is the time between reconciles while a neighbour has not answered or a problem exists. Tests change it.
var repeatEvery = 10 * time.Second

// Run follows the links of every protected namespace until ctx is done. It sets the carrier byte as soon as a link
// loses its carrier or is set down. It clears the byte after the link was good for the hold time of its paths. It
// updates neighbours when routes change, and attaches the fast program while a link is down.
//
// Rerouting itself does not need Run. Without it the egress program uses the pinned maps, and only liveness judges
// the links.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	var watchers feature.Tasks[kernel.Instance]
	memories := map[kernel.Instance]*memory{}
	for range (feature.Loop{Every: renewEvery}).Turns(ctx) {
		all, err := allInstances(r)
		if err != nil && ctx.Err() == nil {
			log.Warn("protected links are not followed", "err", err)
		}
		for _, i := range all {
			m := memories[i]
			if m == nil {
				m = &memory{}
				memories[i] = m
			}
			watchers.Start(i, func() {
				if err := watch(ctx, r, i, log, m); err != nil && ctx.Err() == nil {
					log.Warn("links of a namespace are not followed for a second", "netns", i.Scope, "err", err)
				}
			})
		}
	}
	watchers.Wait()
	return nil
}

// memory is the watchers' state of a namespace. A watcher ends with every error and every new configuration; its
// successor inherits the memory. A link can go down between the two.
type memory struct {
	id    netns.ID
	links map[int]*watched
	kept  map[neigh.Key]*keptNeighbour
	sizes map[wayKey]learntSize
	gone  map[string]links.Reason // reasons against protected links of removed interfaces, by name

	dropping map[string]string // by path: IP versions without any way left, as logged last
}

// watcher follows one namespace.
type watcher struct {
	root  *kernel.Root
	inst  kernel.Instance
	log   feature.Logger
	ns    *netns.Handle
	pins  *kernel.Opened
	words links.Words
	fast  *fast
	scopeSpec
	memory
	due          time.Time // time of the next reconcile; zero: nothing is pending
	lastDuration time.Duration
	amiss        bool
	doubt        bool // a neighbour changed, by reconcile or another program meanwhile
	begun        bool // the first reconcile is done: later changes are noticed
	reconciled   time.Time

	unresolved map[neigh.Key]bool // neighbours without a link address
	standing   bool               // a neighbour may have a stand-in
	stood      time.Time          // time of the last standIns

	ears *neigh.Ears
	told chan neigh.Told

	tooBig  chan tooBig
	repairs atomic.Pointer[map[uint32]bpf.ProtectRerouteRepair] // installed repairs
	sources atomic.Pointer[map[[srv6.SegmentLength]byte]bool]   // sources of their outer headers

	netfilter kernel.NetfilterSeen
	fastAfter time.Time // earliest start of the fast program
	unknown   string    // why it is unknown whether the fast program may run
}

// watched is a link in use.
type watched struct {
	name      string
	slot      uint32
	protected bool
	hold      time.Duration
	up        bool
	seen      bool      // up at the last look
	since     time.Time // up since
	mtu       int
	against   links.Reason // at the last look

	alone []lone    // destinations routed over this link only, from its last time up
	until time.Time // end of the use of its copies; zero: unused
	lost  time.Time // deadline for logging its lost routes; zero: logged, or none lost
}

// errReplaced reports a newly published configuration.
var errReplaced = errors.New("another configuration is published")

// watch follows a namespace until its configuration changes or an error occurs. It starts from the memory m and
// stores its own there.
func watch(ctx context.Context, r *kernel.Root, i kernel.Instance, log feature.Logger, m *memory) error {
	release, ok, err := r.Claim(i)
	if err != nil || !ok {
		return ignore(err, kernel.ErrNotExist) // another process follows it
	}
	defer release()
	w := &watcher{root: r, inst: i, log: log}
	defer w.close()
	if err := w.open(); err != nil {
		return ignore(err, kernel.ErrNotExist, netns.ErrGone)
	}
	if w.memory = (memory{id: w.ID}); m.id == w.ID { // a namespace number can be reused
		w.memory = *m
	}
	for _, l := range w.links {
		l.since = time.Now() // the link may have been down meanwhile
	}
	defer func() { *m = w.memory }()
	done := make(chan struct{})
	defer close(done)
	heard, err := w.subscribe(done)
	if err != nil {
		return err
	}
	defer func() { w.endAll(ctx) }()
	w.told = make(chan neigh.Told, 64)
	if w.ears, err = neigh.Listen(w.ns, w.told); err != nil {
		log.Warn("neighbour announcements are not received: new link addresses are not followed", "netns", i.Scope, "err", err)
	} else {
		defer w.ears.Close()
	}
	w.due = time.Now() // catches changes before the subscription
	if err := w.list(); err != nil {
		return err
	}
	if err := w.resume(); err != nil {
		return err
	}
	if err := w.recall(); err != nil {
		return err
	}
	if stop, err := w.hearTooBig(); err != nil {
		log.Warn("Packet Too Big messages are not received: sizes of repairs are not learnt", "netns", i.Scope, "err", err)
	} else {
		defer stop()
	}
	for !w.pins.Replaced() {
		if err := w.wait(ctx, heard); err != nil {
			return ignore(err, context.Canceled, errReplaced)
		}
	}
	return nil
}

func ignore(err error, these ...error) error {
	for _, e := range these {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}

func (w *watcher) open() (err error) {
	if w.scopeSpec, err = readSpec(w.root, w.inst); err != nil {
		return err
	}
	if w.ns, err = netns.Find(w.Netns, w.ID); err != nil {
		return err
	}
	// This process writes only its own bytes of the link states. Each byte has one writer.
	if w.pins, err = w.root.OpenMapsForWriting(w.inst, pinLinks, pinRepairs, pinPaths, pinPrefixes, pinCounts, pinNeighbours); err != nil {
		return err
	}
	w.words, err = links.MapWords(w.pins.Maps[pinLinks])
	return err
}

func (w *watcher) close() {
	if w.fast != nil {
		w.fast.close()
	}
	if w.words != nil {
		w.words.Close()
	}
	if w.pins != nil {
		w.pins.Close()
	}
	if w.ns != nil {
		w.ns.Close()
	}
}

// list reads all links in use. It runs before reconcile: later changes of links then arrive as news, even if
// reconcile has already included them.
func (w *watcher) list() (err error) {
	was := w.links
	w.links = map[int]*watched{}
	defer func() {
		if err != nil {
			w.links = was
		}
	}()
	return w.ns.Do(func() error {
		r, err := newResolver()
		if err != nil {
			return err
		}
		routes := r.all(w.Paths)
		survey, err := readRoutes() // read before the links: a link down by then keeps its previous routes
		if err != nil {
			return err
		}
		for slot, d := range r.bySlot {
			w.links[d.index] = &watched{name: d.name, slot: slot, mtu: d.mtu, up: true, since: time.Now()}
		}
		for _, t := range routes {
			l := w.links[t.ifindex]
			l.protected, l.hold = true, max(l.hold, t.path.Hold)
		}
		for index, l := range w.links {
			l.inherit(was[index])
		}
		w.passOn(was)
		all, err := interfaces()
		if err != nil {
			return fmt.Errorf("listing interfaces: %w", err)
		}
		for _, l := range all {
			w.link(l, false)
		}
		for index, all := range survey.alone(slices.Collect(maps.Keys(w.links))...) {
			if w.links[index].up {
				w.links[index].alone = all
			}
		}
		return nil
	})
}

// checkRoutes detects missing state without a later event of a link or route.
func (w *watcher) checkRoutes() error {
	return w.ns.Do(func() error {
		r, err := newResolver()
		if err != nil {
			return err
		}
		routes := r.all(w.Paths)
		unkept, err := anyUnkept(routes)
		w.amiss = unkept || len(r.problem) > 0
		return errors.Join(err, w.keptNow(routes))
	})
}

// follow schedules a reconcile after a change of routes or neighbours. If the last one was slow, the delay is longer.
func (w *watcher) follow() {
	if w.due.IsZero() {
		w.due = time.Now().Add(max(quiet, min(20*w.lastDuration, atLatest)))
	}
}

// followLink schedules a reconcile soon after a change of a link. Links change seldom, and a new one is unprotected
// until then.
func (w *watcher) followLink() {
	if at := time.Now().Add(quiet); w.due.IsZero() || w.due.After(at) {
		w.due = at
	}
}

// wait waits for the next event and handles it.
func (w *watcher) wait(ctx context.Context, h heard) error {
	timer := time.NewTimer(w.next())
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Canceled
	case err := <-h.failed:
		return fmt.Errorf("listening for links, routes and neighbours: %w", err)
	case u, ok := <-h.links:
		if !ok {
			return errors.New("listening for links ended")
		}
		w.link(u.Link, u.Header.Type == unix.RTM_DELLINK)
	case u, ok := <-h.routes:
		if !ok {
			return errors.New("listening for routes ended")
		}
		if u.Dst != nil && u.Dst.IP.Equal(helper4.AsSlice()) {
			break // reconcile's own route
		}
		if u.Protocol == keepProtocol {
			break
		}
		if w.fast != nil {
			w.fast.suspend() // the table of routes is outdated
		}
		w.follow()
	case u, ok := <-h.neighbours:
		if !ok {
			return errors.New("listening for neighbours ended")
		}
		w.neighbour(u)
	case t := <-w.told:
		w.hears(w.ears, t)
	case m := <-w.tooBig:
		w.learn(m)
	case <-timer.C:
	}
	if w.ears != nil {
		w.inquire(w.ears)
	}
	w.revert()
	w.tellUsed()
	if err := w.standIns(time.Now()); err != nil {
		return err
	}
	w.tellDropped()
	w.endKept(time.Now())
	w.forgetSizes(time.Now())
	if err := w.catchUp(ctx); errors.Is(err, netlink.ErrDumpInterrupted) {
		w.follow() // links or routes changed during the dump, so it may mix two states
	} else if err != nil {
		return err
	}
	w.hurry()
	return nil
}

// next returns the time until the next timed work.
func (w *watcher) next() time.Duration {
	d := pollInterval
	if !w.due.IsZero() {
		d = min(d, time.Until(w.due))
	}
	for _, l := range w.links {
		if l.up && w.words.Get(l.slot)[links.CarrierByte] != 0 {
			d = min(d, time.Until(l.since.Add(l.hold)))
		}
	}
	return max(d, 0)
}

// revert puts links back into use after their hold time.
func (w *watcher) revert() {
	for _, l := range w.links {
		if l.up && w.words.Get(l.slot)[links.CarrierByte] != 0 && time.Since(l.since) >= l.hold {
			if w.words.Get(l.slot).Reasons() == links.Carrier {
				_ = w.ns.Do(func() error { return w.dropStandIns(l) }) // standIns retries
			}
			w.words.Set(l.slot, links.CarrierByte, false)
			w.log.Info("link is up", "interface", l.name, "hold", l.hold)
		}
	}
}

// catchUp reconciles the namespace when this is due.
func (w *watcher) catchUp(ctx context.Context) error {
	now := time.Now()
	if w.doubt && now.Sub(w.reconciled) > quiet {
		w.doubt = false
		if err := w.checkRoutes(); err != nil {
			return err
		}
	}
	if w.due.IsZero() && w.amiss && now.Sub(w.reconciled) > repeatEvery {
		w.due = now
	}
	if w.due.IsZero() || now.Before(w.due) {
		return nil
	}
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	if w.pins.Replaced() {
		return errReplaced
	}
	w.due, w.doubt = time.Time{}, false
	if err := w.list(); err != nil {
		return err
	}
	if err := reconcileSizes(l, w.inst, w.knownSizes()); err != nil {
		return err
	}
	if err := w.readRepairs(); err != nil {
		return err
	}
	if err := w.tellLost(); err != nil {
		return err
	}
	w.reconciled, w.lastDuration = time.Now(), time.Since(now)
	if err := w.checkRoutes(); err != nil {
		return err
	}
	if !w.begun {
		w.begun = true
		w.log.Info("links are followed", "netns", w.inst.Scope, "interfaces", len(w.links))
	}
	if w.fast != nil {
		return w.fast.learn()
	}
	return nil
}
