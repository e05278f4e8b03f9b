// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/service"
)

// keepSlot gives the slot to a daemon once its sockets are there, and again
// when it has opened others, until ctx is done.
func (s *supervisor) keepSlot(ctx context.Context, pid int) {
	said := ""
	had := false
	for ctx.Err() == nil {
		wait := time.Second
		if s.wanted(pid, had) {
			changed, err := s.admit(ctx, pid)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				had, said = true, ""
				if changed {
					s.Log.Info("slot admitted", "service", s.Slot.Service, "slot", s.Slot.Slot, "pid", pid)
				}
			default:
				if Waiting(err) && !errors.Is(err, service.ErrNotReady) {
					wait = 20 * time.Millisecond
				} else if s.member.Ready != nil {
					wait = s.member.Ready.Every()
				}
				if err.Error() != said {
					said = err.Error()
					s.Log.Warn("slot waits for the daemon", "service", s.Slot.Service, "slot", s.Slot.Slot, "reason", said)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// wanted says whether the slot is to be given to the daemon: at its start; later
// if it is empty, but for an operator who wants it so.
func (s *supervisor) wanted(pid int, had bool) bool {
	slots, err := OpenSlots(s.root, s.Slot.Scope, s.Slot.Service)
	if err != nil {
		return false // the service is gone, for now
	}
	defer slots.Close()
	now, err := slots.state(s.Slot.Slot)
	switch {
	case err != nil || now.withdrawn && had:
		return false
	case now.Admitted() && had:
		return now.outlived(&service.Member{Keep: true})
	}
	return true
}

// admit gives the slot to the daemon, or to the one of its children that has
// the sockets: daemons come in wrappers.
func (s *supervisor) admit(ctx context.Context, pid int) (changed bool, err error) {
	m := s.member
	m.PID = pid
	if changed, err = Admit(ctx, s.root, s.Slot, &m); !errors.Is(err, service.ErrNoSocket) {
		return changed, err
	}
	for _, child := range descendants(pid) {
		m.PID = child
		if changed, cerr := Admit(ctx, s.root, s.Slot, &m); !Waiting(cerr) || errors.Is(cerr, service.ErrNotReady) {
			return changed, cerr
		}
	}
	return false, err
}

// descendants are the processes that a process has started, directly or not,
// the nearest first.
func descendants(pid int) []int {
	var out []int
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", next[0]))
		for _, l := range lists {
			b, _ := os.ReadFile(l)
			for f := range strings.FieldsSeq(string(b)) {
				if child, err := strconv.Atoi(f); err == nil {
					out, next = append(out, child), append(next, child)
				}
			}
		}
	}
	return out
}

// become finds the user, by name or number, that the daemon runs as.
func (s *supervisor) become(name string) (uid int, err error) {
	u, err := user.Lookup(name)
	if _, nerr := strconv.Atoi(name); err != nil && nerr == nil {
		if u, err = user.LookupId(name); err != nil { // a number that has no name, or a system without names
			u, err = &user.User{Uid: name, Gid: name, Username: name, HomeDir: "/"}, nil
		}
	}
	if err != nil {
		return 0, err
	}
	ids := make([]uint32, 0, 2)
	for _, text := range []string{u.Uid, u.Gid} {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return 0, fmt.Errorf("user %s: %w", name, err)
		}
		ids = append(ids, uint32(n))
	}
	s.cred = &syscall.Credential{Uid: ids[0], Gid: ids[1]}
	groups, err := u.GroupIds()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("groups of user %s: %w", name, err)
	}
	for _, g := range groups {
		if n, err := strconv.ParseUint(g, 10, 32); err == nil {
			s.cred.Groups = append(s.cred.Groups, uint32(n))
		}
	}
	s.env = append(s.env, "USER="+u.Username, "LOGNAME="+u.Username, "HOME="+u.HomeDir)
	return int(ids[0]), nil
}
