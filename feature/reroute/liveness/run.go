// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run supervises the tick sources while a process exists. It reseeds a loop without its packet or on a wrong CPU. It
// starts the sessions of late or recreated devices. It checks once a second. Detection itself does not need it.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	w := watch{r, map[string]*known{}}
	defer w.forget(nil)
	for range (feature.Loop{Every: time.Second}).Turns(ctx) {
		wrong := w.wrong()
		if wrong == "" {
			continue
		}
		if err := recoverNow(ctx, r); err != nil && ctx.Err() == nil {
			log.Warn("liveness problem persists", "problem", wrong, "err", err)
		} else if err == nil {
			log.Info("liveness problem fixed", "problem", wrong)
		}
		w.forget(nil)
	}
	return nil
}

// watch caches the opened namespaces between checks, because opening and reading them is the most expensive part.
type watch struct {
	root  *kernel.Root
	known map[string]*known // by scope
}

type known struct {
	published
	*kernel.Opened
	assignments []assignment // from the last findDevices
	polls       int
}

// assignment is a session with its device index; 0: it waits for one.
type assignment struct {
	*Session
	device   int
	lost     bool      // the device has lost the session's program
	function *function // nil: not searched yet, or nobody probes the session
}

// sessionsEvery is the number of checks between reads of the sessions' devices. Other processes change them only in
// Recover.
const sessionsEvery = 10

// forget closes all cached namespaces except the given ones.
func (w *watch) forget(but []string) {
	maps.DeleteFunc(w.known, func(scope string, k *known) bool {
		if slices.Contains(but, scope) {
			return false
		}
		k.Opened.Close()
		return true
	})
}

// wrong describes the first deviation found, "" if there is none. It ignores unreadable state.
func (w *watch) wrong() string {
	all, err := scopes(w.root)
	if err != nil {
		return ""
	}
	w.forget(all)
	for _, scope := range all {
		if what, err := w.wrongIn(scope); err == nil && what != "" { // else removed meanwhile, or of another weir version
			return what
		}
	}
	return ""
}

func (w *watch) wrongIn(scope string) (string, error) {
	k := w.known[scope]
	if k == nil || k.Replaced() {
		var err error
		if k, err = w.open(scope); err != nil {
			return "", err
		}
	}
	var st State
	if err := st.readLoops(k.Opened, k.published, kernel.Monotonic()); err != nil {
		return "", err
	}
	for _, l := range st.TimerLoops {
		if l.Silent > time.Second {
			return fmt.Sprintf("the timer loop of CPU %d does not tick", l.CPU), nil
		}
		if l.CPU >= 0 && int(l.On) != l.CPU {
			return fmt.Sprintf("the timer loop of CPU %d ticks on CPU %d", l.CPU, l.On), nil
		}
	}
	if k.polls%sessionsEvery == 0 {
		if err := k.findDevices(); err != nil {
			return "", err
		}
	}
	k.polls++
	if what, err := k.moved(); err != nil || what != "" {
		return what, err
	}
	return k.changed()
}

// moved reports a neighbour with a link address unknown to the kernel; "": none.
func (k *known) moved() (string, error) {
	for _, p := range k.assignments {
		if p.device == 0 {
			continue
		}
		v, err := readMove(k.Maps[pinMoves], p.device)
		if err != nil {
			return "", err
		}
		if v.Moved != 0 {
			return fmt.Sprintf("the neighbour on %s of session %s has the link address %s, not %s", p.Device, p.Name, net.HardwareAddr(v.Now[:]), net.HardwareAddr(v.Was[:])), nil
		}
	}
	return "", nil
}

// open opens a namespace in place of its cached state.
func (w *watch) open(scope string) (*known, error) {
	if old := w.known[scope]; old != nil {
		old.Opened.Close()
		delete(w.known, scope)
	}
	o, err := w.root.Open(instance(scope), pinSetups, pinClockwork, pinBeats, pinMoves)
	if err != nil {
		return nil, err
	}
	rec, err := store.Decode(o.Instance, o.Meta)
	if err != nil {
		o.Close()
		return nil, err
	}
	k := &known{published: publishedFrom(rec), Opened: o}
	w.known[scope] = k
	return k, nil
}

// findDevices reads the sessions' devices and checks their attachments. A device recreated with its old index has
// lost them.
func (k *known) findDevices() error {
	k.assignments = nil
	bare, err := k.bare()
	if err != nil {
		return err
	}
	var c bpf.LivenessLivenessSetup
	for i := range k.Config.Sessions {
		s := &k.Config.Sessions[i]
		if err := k.Maps[pinSetups].Lookup(k.Indexes[s.Name], &c); err != nil {
			return fmt.Errorf("reading session %q: %w", s.Name, err)
		}
		p := assignment{Session: s}
		if c.On != 0 {
			p.device = int(c.Ifindex)
			p.lost = s.filled().sends() && bare(p.device)
		}
		k.assignments = append(k.assignments, p)
	}
	return nil
}

// bare returns a function reporting whether a sending session's device lacks its program. Links are checked by their
// pins. Without tcx nothing is pinned, so the devices are queried for filters.
func (k *known) bare() (func(device int) bool, error) {
	if !hasTCX() {
		return k.unfiltered, nil
	}
	pins, err := k.Links()
	if err != nil {
		return nil, err
	}
	off := map[int]bool{}
	for _, pin := range pins {
		var device int
		if _, err := fmt.Sscanf(pin, linkReturn+"%d", &device); err == nil {
			off[device] = !k.attached(pin, kernel.TCX{Ifindex: device})
		}
	}
	return func(device int) bool { return off[device] }, nil
}

// unfiltered reports whether a device of the namespace has no filter of ours. It returns false if this is unknown.
func (k *known) unfiltered(device int) (bare bool) {
	ns, err := netns.Find(k.Netns, k.ID)
	if err != nil {
		return false
	}
	defer ns.Close()
	_ = ns.Do(func() error {
		there, err := kernel.Clsact{Ifindex: device, Name: filterName}.Attached()
		bare = err == nil && !there
		return nil
	})
	return bare
}

// attached reports whether a pinned link is attached at the given place.
func (k *known) attached(pin string, at kernel.Attachment) bool {
	ln, err := k.Link(pin)
	if err != nil {
		return true // removed meanwhile: the next check uses the new pins
	}
	defer ln.Close()
	return at.Verify(ln) == nil
}

// changed describes the first deviation of devices and routes from the sessions' assignments, "" if there is none.
func (k *known) changed() (what string, err error) {
	ns, err := netns.Find(k.Netns, k.ID)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	err = ns.Do(func() error {
		at, err := k.appeared()
		if err == nil && at >= 0 {
			what = fmt.Sprintf("device %s of session %s appeared", k.assignments[at].Device, k.assignments[at].Name)
		} else if err == nil {
			what, err = k.unrouted()
		}
		return err
	})
	return what, err
}

// appeared returns the index of a session with a new device, or -1. It checks all sessions each time, and therefore
// asks for device indexes only. A missing device is no change, because it may return.
func (k *known) appeared() (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("looking for devices: %w", err)
	}
	defer unix.Close(fd)
	return slices.IndexFunc(k.assignments, func(p assignment) bool {
		index := deviceNumber(fd, p.Device)
		if index == 0 || index == p.device && !p.lost {
			return false
		}
		_, err := findDevice(p.Device)
		return err == nil
	}), nil
}

// deviceNumber returns a device's index, or 0.
func deviceNumber(socket int, device string) int {
	r, err := unix.NewIfreq(device)
	if err != nil || unix.IoctlIfreq(socket, unix.SIOCGIFINDEX, r) != nil {
		return 0
	}
	return int(r.Uint32())
}

func recoverNow(ctx context.Context, r *kernel.Root) error {
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return Recover(l)
}
