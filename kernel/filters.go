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

// filterRecord is a filter that an instance has at a device in place of a link.
type filterRecord struct {
	Clsact
	Program uint32 `json:"program"` // the id of its program; 0: it was not there
}

// NoteFilters records the filters that a published instance has at devices in place of links,
// all of them: a [Checker] tells which are gone, and which programs of others run before them.
// The caller is in their namespace. As with other records, nothing fails for want of one.
func (l *WriteLock) NoteFilters(i Instance, filters []Clsact) {
	path := filepath.Join(l.recordsAt(l.device()), recordName(i))
	rec, err := readRecord(path)
	if err != nil {
		l.note(i)
		rec, err = readRecord(path)
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

// lostAt says whether the device is there, and has no such filter. The caller is in its namespace.
func (t Clsact) lostAt() bool {
	if _, err := netlink.LinkByIndex(t.Ifindex); err != nil {
		return false // with its device
	}
	there, err := t.Attached()
	return err == nil && !there
}

// location names the filter's place for people. The caller is in its namespace.
func (t Clsact) location() string {
	side := "ingress"
	if t.Egress {
		side = "egress"
	}
	return fmt.Sprintf("tc %s of %s", side, deviceName(uint64(t.Ifindex)))
}

// checkedFilter is a filter of one check that is there.
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
	_ = ns.Do(func() error { // what a reader may not ask is not told
		for _, f := range c.root.stillLost(i, rec.Filters) {
			lost := fault(i, FaultDetached, "the filter %s is gone from %s", f.Name, f.location())
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

// removing is how long a writer usually takes from a filter's removal until it is recorded.
const removing = 50 * time.Millisecond

// stillLost are those filters that are gone from their devices, and are recorded still after a
// moment: a writer takes a filter away first.
func (r *Root) stillLost(i Instance, all []filterRecord) []filterRecord {
	lost := slices.DeleteFunc(slices.Clone(all), func(f filterRecord) bool { return !f.lostAt() })
	if len(lost) == 0 {
		return nil
	}
	time.Sleep(removing)
	rec, err := readRecord(filepath.Join(r.recordsAt(r.device()), recordName(i)))
	if err != nil {
		return nil // removed
	}
	return slices.DeleteFunc(lost, func(f filterRecord) bool {
		noted := slices.ContainsFunc(rec.Filters, func(now filterRecord) bool { return now.Clsact == f.Clsact })
		return !noted || !f.lostAt()
	})
}

// aheadOfFilters looks for what runs before this root's filters.
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
				f.Remedy, f.Device = "tc filter show, bpftool link show and bpftool net show say who attached it", deviceName(uint64(p.at.Ifindex))
				out = append(out, f)
			}
			return nil
		})
	}
	return out
}

// ahead lists what others run before a filter, in words: tc filters, programs of tcx and of
// XDP. The caller is in the namespace.
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
		out = append(out, fmt.Sprintf("a filter %s of priority %d is at %s, before weir's: packets that it drops or redirects never reach weir", what, a.Priority, t.location()))
	}
	hook := ebpf.AttachTCXIngress
	if t.Egress {
		hook = ebpf.AttachTCXEgress
	}
	return append(out, target{Kind: targetTCX, Where: uint64(t.Ifindex), Hook: uint32(hook)}.ahead(ns, 0, ours)...)
}

// restoreFilters attaches filters again whose programs live: an agent holds them. The others'
// features attach what they find missing.
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
			if f.Program == 0 || !f.lostAt() {
				continue
			}
			p, err := ebpf.NewProgramFromID(ebpf.ProgramID(f.Program))
			if err != nil {
				continue // it went with its filter
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
