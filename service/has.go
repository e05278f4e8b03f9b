// SPDX-License-Identifier: Apache-2.0

package service

import (
	"slices"
	"strconv"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/internal/users"
)

// Has reports whether a process belongs to the member: it is named, or a descendant of a named one. known is false if
// this is unknown, for example after the exit of the process or the member.
func (m Member) Has(pid int) (has, known bool) {
	named := m.PID
	switch {
	case m.User != "":
		want, err := users.Find(m.User)
		is, err2 := users.OfProcess(pid)
		uid := want.Credential.Uid
		if is.Credential.Uid == uid {
			return true, err == nil && err2 == nil
		}
		effective, err3 := effectiveUser(pid) // a process registers itself with its effective user
		return effective == uid, err == nil && err2 == nil && err3 == nil
	case m.Unit != "":
		unit := units.OfProcess(pid)
		return unit == m.Unit || unit == m.Unit+".service", unit != ""
	case m.Cgroup != "":
		pids, err := units.CgroupProcs(m.Cgroup)
		return slices.Contains(pids, pid), err == nil && len(pids) > 0
	case m.PIDFile != "":
		var err error
		if named, err = units.ReadPIDFile(m.PIDFile); err != nil {
			return false, false
		}
	}
	p, err := pidfd.Open(named)
	if err != nil {
		return false, false // another process may have taken over its sockets on purpose
	}
	defer p.Close()
	for at := pid; at > 1; {
		if at == named {
			return true, true
		}
		if at, err = pidfd.Parent(at); err != nil {
			return false, false
		}
	}
	return false, p.Alive()
}

func effectiveUser(pid int) (uint32, error) {
	p, err := pidfd.Open(pid)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	info, err := p.Info()
	return info.UID, err
}

// Occupant names a foreign process with the member's slot. It returns "" if the process belongs to the member, or if
// this is unknown.
func (m Member) Occupant(pid int) string {
	if has, known := m.Has(pid); has || !known || pid <= 0 {
		return ""
	}
	return ProcessName(pid)
}

// ProcessName names a process for people: "process 4711 (nfacctd)".
func ProcessName(pid int) string {
	name := "process " + strconv.Itoa(pid)
	if p, err := pidfd.Open(pid); err == nil {
		defer p.Close()
		if info, err := p.Info(); err == nil {
			name += " (" + info.Comm + ")"
		}
	}
	return name
}
