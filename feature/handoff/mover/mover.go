// SPDX-License-Identifier: Apache-2.0

// Package mover provides a keeper's sessions to features that misplace sessions by their changes, as a
// [feature.SessionMover].
package mover

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/service"
)

// DefaultLimit is the time for members to release their sessions before a change. Sessions of slower members are
// moved, or reset, after the change.
const DefaultLimit = 500 * time.Millisecond

// Mover moves the sessions of a keeper.
type Mover struct {
	Socket string        // of the keeper; "": the default
	Limit  time.Duration // 0: DefaultLimit
}

var _ feature.SessionMover = Mover{}

// Sessions implements feature.SessionMover.
func (m Mover) Sessions(ctx context.Context) (feature.MovableSessions, error) {
	report, err := handoff.Status(ctx, m.Socket)
	if err != nil {
		return nil, err
	}
	l := &list{Mover: m, report: report, kept: map[string]map[uint64]bool{}, owner: map[uint64]string{}}
	for _, s := range report.Services {
		l.kept[s.Name] = map[uint64]bool{}
		for _, x := range s.Sessions {
			id, err := strconv.ParseUint(x.ID, 10, 64)
			if err != nil {
				continue
			}
			l.owner[id] = x.Member
			if x.Kind == "session" {
				l.kept[s.Name][id] = x.PID == 0
			}
			l.n++
		}
	}
	return l, nil
}

// list is a keeper's report, indexed.
type list struct {
	Mover
	report handoff.Report
	kept   map[string]map[uint64]bool // by service and session: true if it waits for a member
	owner  map[uint64]string
	tree   *service.Tree // read on first use
	n      int
}

func (l *list) Len() int { return l.n }

func (l *list) Kept(service string, id uint64) (waits, kept bool) {
	waits, kept = l.kept[service][id]
	return waits, kept
}

func (l *list) Owner(id uint64) string { return l.owner[id] }

// Member returns the youngest ready member of the slot's process and its descendants. Without one it returns the
// member named like the slot's number.
func (l *list) Member(name string, slot, pid int) string {
	if pid == 0 {
		return "" // the slot is empty
	}
	members := l.members(name)
	if l.tree == nil && len(members) > 0 {
		tree, err := service.ReadTree()
		if err != nil {
			return ""
		}
		l.tree = &tree
	}
	var best handoff.MemberReport
	pick := func(is func(handoff.MemberReport) bool) bool {
		for _, m := range members { // oldest first
			if is(m) && (m.Ready || !best.Ready) {
				best = m
			}
		}
		return best.PID != 0
	}
	if len(members) == 0 {
		return ""
	}
	pids := l.tree.Descendants([]int{pid})
	if !pick(func(m handoff.MemberReport) bool { return slices.Contains(pids, m.PID) }) {
		pick(func(m handoff.MemberReport) bool { return m.Name == strconv.Itoa(slot) })
	}
	return best.Name
}

func (l *list) members(service string) []handoff.MemberReport {
	for _, s := range l.report.Services {
		if s.Name == service {
			return s.Members
		}
	}
	return nil
}

// Buffer implements feature.MovableSessions.
func (l *list) Buffer(ctx context.Context, ids ...uint64) (feature.BufferedSessions, error) {
	d, err := handoff.Direct(ctx, l.Socket)
	if err != nil {
		return nil, err
	}
	parked, _, err := d.Suspend(ctx, cmp.Or(l.Limit, DefaultLimit), ids...)
	if err != nil {
		d.Close()
		return nil, err
	}
	return &buffered{d, parked}, nil
}

type buffered struct {
	*handoff.Director
	ids []uint64
}

func (b *buffered) IDs() []uint64 { return b.ids }
