// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
)

// filterRecord is the record of a tc filter, used in place of a link.
type filterRecord struct {
	Clsact
	Program uint32 `json:"program"` // ID of its program; 0 if the filter was missing
}

// NoteFilters records all tc filters of a published instance. [Checker] then reports missing filters and foreign
// programs before them. The caller is in their namespace. Like other records, a failure to write it is not an error.
func (l *WriteLock) NoteFilters(i Instance, filters []Clsact) {
	path := filepath.Join(l.recordsAt(l.device()), recordName(i))
	rec, err := l.readRecord(path)
	if err != nil {
		l.note(i)
		rec, err = l.readRecord(path)
	}
	if err != nil {
		return
	}
	var now []filterRecord
	for _, t := range filters {
		program, _ := t.Program()
		now = append(now, filterRecord{t, program})
	}
	slices.SortFunc(now, func(a, b filterRecord) int { return strings.Compare(a.key(), b.key()) })
	if slices.Equal(now, rec.Filters) {
		return
	}
	rec.Filters = now
	l.writeRecord(rec)
}

func (t Clsact) key() string { return fmt.Sprintf("%s %08d %t", t.Name, t.Ifindex, t.Egress) }

// lostAt reports whether the device exists without the filter. The caller is in its namespace.
func (t Clsact) lostAt() bool {
	if _, err := netlink.LinkByIndex(t.Ifindex); err != nil {
		return false // gone with its device
	}
	there, err := t.Attached()
	return err == nil && !there
}

// location names the filter's hook for people. The caller is in its namespace.
func (t Clsact) location() string {
	side := "ingress"
	if t.Egress {
		side = "egress"
	}
	return fmt.Sprintf("tc %s of %s", side, deviceName(uint64(t.Ifindex)))
}

// checkedFilter is an existing filter of one check.
type checkedFilter struct {
	instance Instance
	at       Clsact
}

// filters checks the filters of one instance.
func (c *Checker) filters(i Instance, rec record) (out []Fault) {
	ns := c.space(i.Scope)
	if ns == nil {
		return nil
	}
	_ = ns.Do(func() error { // skip hooks unreadable for this user
		for _, f := range c.root.stillLost(i, rec.Filters) {
			lost := fault(i, FaultDetached, "filter %s is missing from %s", f.Name, f.location())
			lost.Device = deviceName(uint64(f.Ifindex))
			out = append(out, lost)
		}
		for _, f := range rec.Filters {
			if id, err := f.Clsact.Program(); err == nil && id != 0 {
				c.ours[id] = true
				c.present = append(c.present, checkedFilter{i, f.Clsact})
			}
		}
		return nil
	})
	return out
}

// removing is the usual time between a filter's removal and its record.
const removing = 50 * time.Millisecond

// stillLost returns the filters missing from their devices and still recorded after a moment. A writer removes a filter
// before its record.
func (r *Root) stillLost(i Instance, all []filterRecord) []filterRecord {
	lost := slices.DeleteFunc(slices.Clone(all), func(f filterRecord) bool { return !f.lostAt() })
	if len(lost) == 0 {
		return nil
	}
	time.Sleep(removing)
	rec, err := r.readRecord(filepath.Join(r.recordsAt(r.device()), recordName(i)))
	if err != nil {
		return nil // removed
	}
	return slices.DeleteFunc(lost, func(f filterRecord) bool {
		noted := slices.ContainsFunc(rec.Filters, func(now filterRecord) bool { return now.Clsact == f.Clsact })
		return !noted || !f.lostAt()
	})
}

// aheadOfFilters finds foreign programs before this root's filters.
func (c *Checker) aheadOfFilters() (out []Fault) {
	told := map[string]bool{}
	for _, p := range c.present {
		ns := c.space(p.instance.Scope)
		if ns == nil {
			continue
		}
		_ = ns.Do(func() error {
			for _, text := range p.at.ahead(ns, c.ours) {
				if told[p.instance.Scope+text] {
					continue
				}
				told[p.instance.Scope+text] = true
				f := fault(p.instance, FaultAhead, "%s", text)
				f.Remedy, f.Device = "find its owner with tc filter show, bpftool link show and bpftool net show", deviceName(uint64(p.at.Ifindex))
				out = append(out, f)
			}
			return nil
		})
	}
	return out
}

// ahead describes the foreign tc filters, tcx programs and XDP programs that run before a filter. The caller is in the
// namespace.
func (t Clsact) ahead(ns *netns.Handle, ours map[uint32]bool) (out []string) {
	all, err := t.filters()
	if err != nil {
		return nil
	}
	for _, f := range all {
		b, isBPF := f.(*netlink.BpfFilter)
		if isBPF && b.Name == t.Name {
			break
		}
		a := f.Attrs()
		if isBPF && ours[uint32(b.Id)] || a.Chain != nil && *a.Chain != 0 {
			continue
		}
		what := f.Type()
		if isBPF {
			what = fmt.Sprintf("%q", b.Name)
		}
		out = append(out, fmt.Sprintf("filter %s of priority %d runs at %s before weir's: packets it drops or redirects never reach weir", what, a.Priority, t.location()))
	}
	hook := ebpf.AttachTCXIngress
	if t.Egress {
		hook = ebpf.AttachTCXEgress
	}
	return append(out, target{Kind: targetTCX, Where: uint64(t.Ifindex), Hook: uint32(hook)}.ahead(ns, 0, ours)...)
}

// restoreFilters attaches missing filters again whose programs are still held by an agent and use a map of the instance.
// Features attach their other missing filters.
func (l *WriteLock) restoreFilters(i Instance, rec record) error {
	if len(rec.Filters) == 0 {
		return nil
	}
	ns, err := l.OpenNetns(i)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error {
		for _, f := range rec.Filters {
			if f.Program == 0 || !f.lostAt() || !NewChecker(l.Root).runsOwn(i, ebpf.ProgramID(f.Program)) {
				continue
			}
			p, err := ebpf.NewProgramFromID(ebpf.ProgramID(f.Program))
			if err != nil {
				continue // released with its filter
			}
			err = f.Attach(p)
			p.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
}
