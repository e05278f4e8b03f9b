// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	return feature.SocketFlag{Name: "handoff-socket", Usage: "socket for members that hand over sessions", Default: wire.DefaultSocket}
}

// Socket implements feature.SocketServer: a keeper for the members of services.
func (Feature) Socket(r *kernel.Root, log *slog.Logger, members feature.Members) feature.Socket {
	s := &socket{root: r, log: log, members: members}
	s.Keeper = New(Options{Log: log, Allow: s.allow, Store: Store()})
	return s
}

// socket is the keeper of one weir serve.
type socket struct {
	*Keeper
	root    *kernel.Root
	log     *slog.Logger
	members feature.Members
}

// Serve implements feature.Socket. Another keeper at the path, or another user's process, is no reason for weir serve not to start.
func (s *socket) Serve(ctx context.Context, path string) error {
	l, err := Listen(path)
	switch {
	case errors.Is(err, ErrTaken):
		// weir handoff keep outlives restarts of weir serve. A predecessor that was killed ends soon.
		if l, err = ListenAgain(ctx, s.log, path); err != nil {
			if ctx.Err() == nil {
				s.log.Warn("sessions are kept by another keeper", "socket", path)
			}
			return nil
		}
	case errors.Is(err, accept.ErrImpostor):
		// Whoever takes the name first must not keep weir serve from all else.
		s.log.Error("sessions are not kept, members refuse the process at the socket", "socket", path, "err", err)
		return nil
	case err != nil:
		return err
	}
	inherit(s.Keeper, s.log)
	s.log.Info("keeping sessions of members", "socket", path)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Keeper.Serve(ctx, l) })
	g.Go(func() error { return s.Keeper.Follow(ctx, s.root, s.log) })
	return g.Wait()
}

// inherit takes what the weir serve before left with systemd.
func inherit(k *Keeper, log *slog.Logger) {
	files, err := Inherited()
	if err = errors.Join(err, k.Inherit(files)); err != nil {
		log.Warn("not all that waited for a member could be taken over", "err", err)
	}
}

// allow is Options.Allow of a keeper in weir serve: a service's sessions are for its members. A name that is the number of a slot with a member is for that member alone:
// steering knows a slot's member by it.
func (s *socket) allow(ctx context.Context, name, member string, p Peer) error {
	members, err := s.members(name)
	if err != nil {
		return fmt.Errorf("process %d of user %d: %w", p.PID, p.UID, err)
	}
	slot, err := strconv.Atoi(member)
	named := err == nil && slices.ContainsFunc(members, func(m svc.Member) bool { return m.Slot == slot })
	other := -1
	for _, m := range members {
		switch {
		case !Matches(ctx, m, p):
		case !named || m.Slot == slot:
			return nil
		default:
			other = m.Slot
		}
	}
	if other >= 0 {
		return fmt.Errorf("process %d of user %d is the member of slot %d of service %q, not of slot %d: let it take the number of its own slot as its name", p.PID, p.UID, other, name, slot)
	}
	return fmt.Errorf("process %d of user %d is no member of service %q: root is, and the members that weir.yaml names for its slots, by user: %d for one", p.PID, p.UID, name, p.UID)
}
