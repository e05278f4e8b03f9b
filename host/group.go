// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/bigjson"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
)

// defaultGroup may read weir's pins, if the group exists and the configuration names no other.
const defaultGroup = "weir"

// savedGroup is the key of the group in a savedHost.
const savedGroup = "@group"

// gid returns the group with read access.
func (c *Config) gid() (int, error) {
	name := c.Group
	if name == "" {
		name = defaultGroup
	}
	g, err := user.LookupGroup(name)
	var unknown user.UnknownGroupError
	switch {
	case c.Group == "" && (errors.As(err, &unknown) || errors.Is(err, os.ErrNotExist)): // minimal systems have no /etc/group
		return 0, nil
	case err != nil:
		return 0, c.Pos.Errorf("group: %v: create it with 'groupadd --system %s', or leave the key out", err, name)
	}
	return strconv.Atoi(g.Gid)
}

// otherGroup returns the group with read access now, and whether an apply changes it. Without instances nothing can be
// read: a group is then set and not changed.
func (h *Host) otherGroup(gid int) (now int, other bool) {
	now, ok := h.Root.Group()
	return now, ok && now != gid && !h.blank()
}

// planGroup adds the change of the group with read access before all other steps.
func (h *Host) planGroup(plan *feature.Plan, gid int) {
	now, other := h.otherGroup(gid)
	if !other {
		return
	}
	set := func(gid int) func(context.Context, *kernel.WriteLock) error {
		return func(_ context.Context, l *kernel.WriteLock) error { return l.SetGroup(gid) }
	}
	plan.Steps = slices.Insert(plan.Steps, 0, feature.Step{Verb: "change", Object: "readers", Detail: fmt.Sprintf("group %s in place of %s", users.GroupName(gid), users.GroupName(now)),
		Do: func(ctx context.Context, l *kernel.WriteLock) (string, error) { return "", set(gid)(ctx, l) }})
	plan.Undo = slices.Insert(plan.Undo, 0, set(now))
}

// saveGroup saves the group for a rollback.
func (h *Host) saveGroup(saved savedHost) {
	if gid, ok := h.Root.Group(); ok {
		saved[savedGroup] = json.RawMessage(strconv.Itoa(gid))
	}
}

// restoreGroup restores a saved group.
func (h *Host) restoreGroup(ctx context.Context, l *kernel.WriteLock, saved *bigjson.Object, each func(Done)) error {
	text, err := saved.Get(savedGroup)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(string(text))
	if err != nil {
		return nil //nolint:nilerr // without pins, and in earlier versions, no group was saved
	}
	var plan feature.Plan
	h.planGroup(&plan, gid)
	return goBack(ctx, l, plan, each)
}

// followGroup gives the socket the group of the pins whenever weir apply has changed it. Otherwise a revoked group could
// go on reading.
func (h *Host) followGroup(ctx context.Context, path string, log *slog.Logger) {
	var failure feature.Reported[string]
	for range (feature.Loop{Every: time.Second, Root: h.Root}).Turns(ctx) {
		gid, ok := h.Root.Group()
		if !ok {
			continue // nothing to read
		}
		socket, err := os.Lstat(path)
		if err != nil {
			continue // another weir serve replaces it
		}
		if gid == groupOf(socket) {
			continue
		}
		text := ""
		if err := permit(path, gid); err != nil {
			text = err.Error()
		} else {
			log.Info("another group may read", "socket", path, "group", users.GroupName(gid))
		}
		if failure.Changed(path, text) && text != "" {
			log.Warn("group of the socket not changed", "socket", path, "group", users.GroupName(gid), "err", text)
		}
	}
}

// permit gives the socket of weir serve to the group of readers.
func permit(path string, gid int) error {
	return users.NotIn(accept.Permit(path, gid, 0o660), gid)
}

func groupOf(f os.FileInfo) int { return int(f.Sys().(*syscall.Stat_t).Gid) }
