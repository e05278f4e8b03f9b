// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/kernel"
	svc "github.com/weir-project/weir/service"
	"golang.org/x/sync/errgroup"
)

// SocketFlag implements feature.SocketServer.
func (Feature) SocketFlag() feature.SocketFlag {
	return feature.SocketFlag{Name: "handoff-socket", Usage: "socket for members of the session keeper", Default: wire.DefaultSocket}
}

// Socket implements feature.SocketServer. It returns a keeper for the members of services.
func (Feature) Socket(r *kernel.Root, log *slog.Logger, members feature.Members) feature.Socket {
	s := &socket{root: r, log: log, members: members}
	s.Keeper = New(Options{Log: log, Allow: s.allow, Store: Store()})
	return s
}

// socket is the keeper of a weir serve.
type socket struct {
	*Keeper
	root    *kernel.Root
	log     *slog.Logger
	members feature.Members
	byFile  bool // configured by the file, not by the pins
}

var (
	_ feature.FileSocket = (*socket)(nil)
	_ feature.Expectant  = (*socket)(nil)
)

// Expect implements feature.Expectant: members may connect before the file's limits are pinned.
func (s *socket) Expect(d *feature.Document) {
	if l, ok := (Feature{}).Spec(d); ok {
		s.Limit(l)
	}
}

// Configure implements feature.FileSocket.
func (s *socket) Configure(d *feature.Document) error {
	if !s.byFile {
		s.byFile = true // before Serve: no concurrent reader yet
	}
	l, _ := Feature{}.Spec(d)
	s.Limit(l)
	return nil
}

// Serve implements feature.Socket. Another keeper at the path, or another user's process, must not keep weir serve
// from starting.
func (s *socket) Serve(ctx context.Context, path string) error {
	l, err := Listen(path)
	switch {
	case errors.Is(err, errTaken):
		// weir handoff keep outlives restarts of weir serve. A killed predecessor exits soon.
		if l, err = ListenAgain(ctx, s.log, path); err != nil {
			if ctx.Err() == nil {
				s.log.Warn("sessions are kept by another keeper", "socket", path)
			}
			return nil
		}
	case errors.Is(err, accept.ErrImpostor):
		// A process that takes the name first must not block the rest of weir serve.
		s.log.Error("sessions are not kept, members refuse the process at the socket", "socket", path, "err", err)
		return nil
	case err != nil:
		return err
	}
	if st, err := (Feature{}).State(ctx, s.root); !s.byFile && err == nil && st.Limits != nil {
		s.Limit(*st.Limits) // before the first member, because Welcome contains them
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Keep(ctx, l) })
	if !s.byFile {
		g.Go(func() error { return s.Keeper.follow(ctx, s.root, s.log) })
	}
	return g.Wait()
}

// Keep is Serve, after taking over the predecessor's sessions from systemd.
func (k *Keeper) Keep(ctx context.Context, l *net.UnixListener) error {
	files, err := Inherited()
	if err = errors.Join(err, k.Inherit(files)); err != nil {
		k.Log.Warn("some waiting sessions could not be taken over", "err", err)
	}
	k.Log.Info("keeping sessions of members", "socket", l.Addr().String())
	return k.Serve(ctx, l)
}

// allow is Options.Allow of a keeper in weir serve: only members of a service may have its sessions. A name equal to
// the number of a slot with a member is reserved for that member, because steering finds a slot's member by it.
func (s *socket) allow(ctx context.Context, name, member string, p Peer) error {
	if s.byFile { // without pins only rules allow
		return Rules{}.Allow(ctx, name, member, p)
	}
	members, err := s.members(name)
	switch {
	case errors.Is(err, kernel.ErrNotExist):
		return fmt.Errorf("process %d of user %d: %w", p.PID, p.UID, err)
	case err != nil: // the members of the slots are unknown
		return firm{fmt.Errorf("process %d of user %d: %w", p.PID, p.UID, err)}
	}
	slot, err := strconv.Atoi(member)
	named := err == nil && slices.ContainsFunc(members, func(m svc.Member) bool { return m.Slot == slot })
	other := -1
	for _, m := range members {
		switch {
		case !matches(ctx, m, p):
		case !named || m.Slot == slot:
			return nil
		default:
			other = m.Slot
		}
	}
	switch {
	case other >= 0:
		return firm{fmt.Errorf("process %d of user %d is the member of slot %d of service %q, not of slot %d: use the number of its own slot as its name", p.PID, p.UID, other, name, slot)}
	case named:
		return firm{fmt.Errorf("process %d of user %d is no member of service %q in slot %d: name it for the slot in weir.yaml, for example by user: %d; processes of handoff.keeper.allow need another name",
			p.PID, p.UID, name, slot, p.UID)}
	}
	return fmt.Errorf("process %d of user %d is no member of service %q: name it for a slot in weir.yaml, for example by user: %d, or in handoff.keeper.allow", p.PID, p.UID, name, p.UID)
}
