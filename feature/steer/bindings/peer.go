// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

var (
	// ErrRefused means that a process may not register for a slot.
	ErrRefused = errors.New("refused")
	// ErrWithdrawn means that an operator keeps the slot empty.
	ErrWithdrawn = errors.New("withdrawn by weir steer withdraw")
)

// Peer is a process that registers for a slot. The data comes from the kernel (SO_PEERCRED), never from the process.
type Peer struct {
	PID int
	UID uint32 // effective, at the time of the connection
}

// RegisterPeer gives a slot to its peer when all its sockets exist and the slot's check has passed. It waits for that
// until ctx is done. Root may request any slot. Other users may request a slot if its configured member is this
// process, or has kind user and names the peer's user.
func RegisterPeer(ctx context.Context, r *kernel.Root, name string, slot int, peer Peer) error {
	proc, err := pidfd.Open(peer.PID)
	if err != nil {
		return fmt.Errorf("%w: %w", service.ErrNotRunning, err)
	}
	defer proc.Close()
	who, err := peer.process(proc)
	if err != nil {
		return err
	}
	s, p, err := slotFor(r, name, slot, peer.PID)
	if err != nil {
		return err
	}
	if _, err := authorise(p, ctx, s, peer); err != nil {
		return err
	}
	var last error
	for {
		began := time.Now()
		ready, err := lookOnce(ctx, r, s, who, peer)
		if errors.Is(err, errTurn) && last != nil {
			err = last
		}
		if last = err; err == nil || !engine.Waiting(err) || !proc.Alive() {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("slot %d of %s stays empty: %w", slot, name, err)
		case <-time.After(pauseAfter(err, ready, time.Since(began), peer.UID)):
		}
	}
}

// pauseAfter returns the minimum pause before the next search. The user's turn may come later.
func pauseAfter(err error, ready *service.Ready, took time.Duration, uid uint32) time.Duration {
	switch {
	case errors.Is(err, service.ErrNotReady) && ready != nil:
		return max(between, ready.Every())
	case uid == 0: // root does not take turns
		return max(between, min(lookShare*took, 2*time.Second))
	}
	return between
}

// registering limits the searches for sockets of waiting processes.
var registering turns

// between is the minimum time between two searches for one process.
const between = 20 * time.Millisecond

// lookOnce searches for a process's sockets when it is its user's turn, and admits the process if they exist. It returns
// the slot's check.
func lookOnce(ctx context.Context, r *kernel.Root, s slots.Slot, who slots.Process, peer Peer) (*service.Ready, error) {
	done, err := registering.claim(ctx, peer.UID)
	if err != nil {
		return nil, err
	}
	m, err := find(ctx, r, s, peer)
	if err != nil {
		done(0)
		return m.Ready, err
	}
	// The sockets exist. The check and the lock may take long, so the next process need not wait for them.
	done(2)
	_, err = engine.AdmitOnly(ctx, r, s, &m, who, func() error {
		brief, cancel := context.WithTimeout(ctx, engine.UnderLock)
		defer cancel()
		_, now, err := entitled(brief, r, s, peer)
		if err == nil && !reflect.DeepEqual(now, m) {
			err = fmt.Errorf("%w: the slot's member was changed meanwhile", service.ErrNotReady)
		}
		return err
	})
	return m.Ready, err
}

// find returns the peer as a member if it has all sockets of a slot, and the slot accepts it.
func find(ctx context.Context, r *kernel.Root, s slots.Slot, peer Peer) (service.Member, error) {
	p, m, err := entitled(ctx, r, s, peer)
	if err == nil {
		_, err = engine.FindMember(p, ctx, s, m)
	}
	return m, err
}

// entitled returns a slot's service, and the peer as a member of the slot. It returns an error if the peer may not have
// the slot now: the configuration may have changed while it waited, or an operator has withdrawn the slot.
func entitled(ctx context.Context, r *kernel.Root, s slots.Slot, peer Peer) (p *record.Service, m service.Member, err error) {
	if err := notWithdrawn(r, s); err != nil {
		return nil, m, err
	}
	if p, err = record.Read(r, record.Instance(s.Scope, s.Service)); err != nil {
		return nil, m, fmt.Errorf("service %s: %w", s.Service, err)
	}
	m, err = authorise(p, ctx, s, peer)
	m.PID = peer.PID
	return p, m, err
}

// process checks that the PID still belongs to the connected process: the user must be the same.
func (p Peer) process(proc *pidfd.Process) (slots.Process, error) {
	info, err := proc.Info()
	if err != nil || !proc.Alive() {
		return slots.Process{}, fmt.Errorf("%w: process %d has exited", service.ErrNotRunning, p.PID)
	}
	if info.UID != p.UID && p.UID != 0 {
		return slots.Process{}, fmt.Errorf("%w: process %d has become user %d since it connected as %d", ErrRefused, p.PID, info.UID, p.UID)
	}
	return slots.Process{PID: p.PID, Start: info.StartTime}, nil
}

// slotFor finds the slot by service name. If several namespaces have the service, it selects the process's namespace.
func slotFor(r *kernel.Root, name string, slot, pid int) (slots.Slot, *record.Service, error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return slots.Slot{}, nil, err
	}
	all = slices.DeleteFunc(all, func(i kernel.Instance) bool { return i.Name != name || !kernel.ValidName(name) })
	if len(all) > 1 {
		if ns, err := netns.OfPID(pid); err == nil {
			own := record.Scope(ns)
			ns.Close()
			all = slices.DeleteFunc(all, func(i kernel.Instance) bool { return i.Scope != own })
		}
	}
	if len(all) != 1 {
		return slots.Slot{}, nil, fmt.Errorf("service %q: %w", name, kernel.ErrNotExist)
	}
	s := slots.Slot{Scope: all[0].Scope, Service: name, Slot: slot}
	p, err := record.Read(r, all[0])
	if err != nil {
		return s, nil, err
	}
	if slot < 0 || slot >= p.Service.Slots {
		return s, nil, fmt.Errorf("%w: %s has slots 0 to %d", record.ErrNoSlot, name, p.Service.Slots-1)
	}
	return s, p, nil
}

// authorise checks whether a peer may have the slot. It returns the configured sockets and check.
func authorise(p *record.Service, ctx context.Context, s slots.Slot, peer Peer) (service.Member, error) {
	configured := p.Service.Member(s.Slot)
	m := service.Member{Slot: s.Slot}
	if configured != nil {
		m.Bound, m.Ready, m.Keep = configured.Bound, configured.Ready, configured.Keep
	}
	if peer.UID == 0 {
		return m, nil
	}
	refused := fmt.Errorf("%w: user %d may not register for slot %d of %s: allowed are root, the slot's configured member, and the user of {slot: %d, user: NAME}",
		ErrRefused, peer.UID, s.Slot, s.Service, s.Slot)
	switch {
	case configured == nil:
		return m, refused
	case configured.User != "":
		if uid, err := lookupUID(configured.User); err != nil || uid != peer.UID {
			return m, refused
		}
		return m, nil
	}
	if pids, err := configured.Processes(ctx); err != nil || !slices.Contains(pids, peer.PID) {
		return m, refused
	}
	return m, nil
}

// lookupUID returns the number of a user given by name or number.
func lookupUID(name string) (uint32, error) {
	u, err := user.Lookup(name)
	if err != nil {
		u = &user.User{Uid: name}
	}
	n, nerr := strconv.ParseUint(u.Uid, 10, 32)
	if nerr != nil {
		return 0, err
	}
	return uint32(n), nil
}

// notWithdrawn returns ErrWithdrawn if an operator has withdrawn the slot.
func notWithdrawn(r *kernel.Root, s slots.Slot) error {
	withdrawn, err := engine.IsWithdrawn(r, s)
	if err == nil && withdrawn {
		err = fmt.Errorf("slot %d of %s is %w: weir steer admit admits its member again", s.Slot, s.Service, ErrWithdrawn)
	}
	return err
}
