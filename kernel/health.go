// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel/internal/confined"
)

// Fault is damage to pinned state, or a foreign program that decides before weir's.
type Fault struct {
	Instance Instance  `json:"-"` // zero: the root itself
	Feature  string    `json:"feature,omitempty"`
	Object   string    `json:"object"` // the instance, or the path of the root
	Kind     FaultKind `json:"kind"`
	Text     string    `json:"text"`
	Remedy   string    `json:"remedy"`

	Device string `json:"-"` // device of the fault, if any
}

// FaultKind is the kind of a fault.
type FaultKind string

// Kinds of faults.
const (
	FaultRoot     FaultKind = "root"     // the BPF file system is gone, covered or read-only
	FaultPins     FaultKind = "pins"     // pins of an instance are missing
	FaultDetached FaultKind = "detached" // a link or filter is not attached
	FaultProgram  FaultKind = "program"  // a link runs a foreign program
	FaultAhead    FaultKind = "ahead"    // a foreign program runs at the same hook
)

// Damage reports whether the fault breaks something. Other faults are only notable.
func (f Fault) Damage() bool { return f.Kind != FaultAhead }

// String formats the fault in one line.
func (f Fault) String() string {
	return f.Who() + ": " + f.Text
}

// Who names the feature and its instance, or the root.
func (f Fault) Who() string { return strings.TrimLeft(f.Feature+" ", " ") + f.Object }

// remedyApply is the remedy of damage repaired by weir apply.
const remedyApply = "weir apply recovers it"

// Checker looks for faults repeatedly. It caches the records.
type Checker struct {
	root  *Root
	cache recordCache
	owned map[ownership]bool // cached answers of usesMap from the previous check

	asked   map[ownership]bool       // the answers of this check
	ours    map[uint32]bool          // programs of this root's links
	spaces  map[string]*netns.Handle // by scope, for one check
	cookies map[string]uint64        // of these namespaces
	links   []checked
	present []checkedFilter
}

// ownership is a question to usesMap. Its answer is valid until a pin of the instance's directory changes: a program's
// maps are fixed at load time, and the link identifies its program.
type ownership struct {
	directory uint64 // its inode number
	changed   syscall.Timespec
	link      link.ID
	program   ebpf.ProgramID
}

// checked is an attached link of one check.
type checked struct {
	instance Instance
	name     string
	target   target
	program  uint32
}

// NewChecker returns a checker of a root.
func NewChecker(r *Root) *Checker {
	c := &Checker{root: r, cache: recordCache{}}
	c.open()
	return c
}

// open starts a check.
func (c *Checker) open() {
	c.ours, c.spaces, c.cookies, c.links, c.present = map[uint32]bool{}, map[string]*netns.Handle{}, map[string]uint64{}, nil, nil
	c.asked = map[ownership]bool{}
}

// Check looks for faults once.
func (r *Root) Check() ([]Fault, error) { return NewChecker(r).Check() }

// Check compares the pins of every instance with its record. All pins must exist, each link must be attached to its
// recorded hook and run a program of the instance, and recorded tc filters must exist. Check also reports a replaced BPF
// file system of the root, and foreign programs at the hooks. A reader without access to links gets only the faults of
// pins.
func (c *Checker) Check() ([]Fault, error) {
	out := c.root.rootFaults()
	all, err := c.root.Instances("")
	if err != nil {
		return out, err
	}
	recs := c.cache.read(c.root, c.root.recordsAt(c.root.device()))
	c.open()
	defer c.close()
	for _, i := range all {
		out = append(out, c.instance(i, recs[i])...)
		delete(recs, i)
	}
	for _, i := range inOrder(recs) {
		if now, _ := c.root.Instances(i.Feature); slices.Contains(now, i) || c.gone(i, recs[i]) {
			continue // published meanwhile, or its namespace is gone
		}
		out = append(out, fault(i, FaultPins, "all its pins are gone"))
	}
	out = append(out, c.ahead()...)
	return append(out, c.aheadOfFilters()...), nil
}

// close closes the namespaces of a check.
func (c *Checker) close() {
	for _, ns := range c.spaces {
		if ns != nil {
			ns.Close()
		}
	}
	c.owned = c.asked
	c.open()
}

func fault(i Instance, kind FaultKind, format string, a ...any) Fault {
	return Fault{Instance: i, Feature: i.Feature, Object: i.describe(), Kind: kind, Text: printable.OneLine(fmt.Sprintf(format, a...)), Remedy: remedyApply}
}

// NotAttached returns the fault of an instance with a missing attachment.
func NotAttached(i Instance, format string, a ...any) Fault {
	return fault(i, FaultDetached, format, a...)
}

// describe names an instance of a feature for people.
func (i Instance) describe() string {
	if i.Scope == HostScope {
		return i.Name
	}
	return fmt.Sprintf("%s in net:[%s]", i.Name, i.Scope)
}

// space returns the namespace of a scope. It returns nil if the namespace is gone or the scope is not a namespace.
func (c *Checker) space(scope string) *netns.Handle {
	ns, known := c.spaces[scope]
	if !known && scope != HostScope {
		ns, _ = netns.OfScope("", scope, 0)
		c.spaces[scope] = ns
	}
	return ns
}

// gone reports whether the namespace of an instance is gone, or another namespace has its number.
func (c *Checker) gone(i Instance, rec record) bool {
	ns := c.space(i.Scope)
	if i.Scope == HostScope || ns == nil {
		return i.Scope != HostScope && users.SeesAll() // other users may lack access to it
	}
	was := rec.cookie
	if rec.Meta == nil {
		m, _ := c.root.Meta(i)
		was = m.Cookie
	}
	if was == 0 {
		return false
	}
	now, known := c.cookies[i.Scope]
	if !known {
		now, _ = ns.Cookie() // 0 if the kernel has no cookies
		c.cookies[i.Scope] = now
	}
	return now != 0 && now != was
}

// instance checks one instance.
func (c *Checker) instance(i Instance, rec record) []Fault {
	dir := c.root.dir(i)
	st, err := os.Stat(dir)
	if err != nil {
		return nil // removed meanwhile
	}
	if rec.Dir != st.Sys().(*syscall.Stat_t).Ino {
		rec = record{Maps: map[string]ebpf.MapID{}} // published again by another version of weir
		if meta, err := c.root.Meta(i); err == nil {
			for _, name := range meta.parts.Maps {
				rec.Maps[name] = 0
			}
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	if c.gone(i, rec) {
		return nil // the next command removes it; another namespace may have its number
	}
	var out []Fault
	if lost := missing(rec, entries); len(lost) > 0 {
		// The instance may be in removal: its directory is renamed first.
		if now, err := os.Stat(dir); err != nil || !os.SameFile(st, now) {
			return nil
		}
		out = append(out, fault(i, FaultPins, "pins are gone: %s", strings.Join(lost, ", ")))
	}
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), linkPrefix)
		if !ok {
			continue
		}
		if f, bad := c.link(i, st, rec, name); bad {
			out = append(out, f)
		}
	}
	return append(out, c.filters(i, rec)...)
}

// missing returns the recorded pins missing from a directory.
func missing(rec record, entries []os.DirEntry) (lost []string) {
	have := map[string]bool{}
	for _, e := range entries {
		have[e.Name()] = true
	}
	if !have[metaPin] {
		lost = append(lost, metaPin)
	}
	for _, name := range slices.Sorted(maps.Keys(rec.Maps)) {
		if !have[mapPrefix+name] {
			lost = append(lost, mapPrefix+name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rec.Links)) {
		if !have[linkPrefix+name] {
			lost = append(lost, linkPrefix+name)
		}
	}
	return lost
}

// link checks one pinned link.
func (c *Checker) link(i Instance, dir os.FileInfo, rec record, name string) (f Fault, bad bool) {
	ln, err := confined.LoadLink(c.root.path, filepath.Join(c.root.dir(i), linkPrefix+name))
	if err != nil {
		return f, false // removed meanwhile, or unreadable for this user
	}
	defer ln.Close()
	info, err := ln.Info()
	if err != nil {
		return f, false
	}
	was, known := rec.Links[name]
	is := newTarget(info)
	c.ours[uint32(info.Program)] = true
	ns := c.space(i.Scope)
	inSpace(ns, func() {
		switch {
		case known && was.ID != info.ID:
			f, bad = fault(i, FaultDetached, "%s%s is another link than weir pinned there", linkPrefix, name), true
		case is.Kind.detachable() && is.Where == 0:
			if bad = detached(i, name, was, known, ns); bad {
				f = fault(i, FaultDetached, "%s%s is detached: nothing runs at %s", linkPrefix, name, was.orName(name))
			}
		case is.Kind == targetNetfilter && ns != nil && nothingAt(is.netfilter()):
			f, bad = fault(i, FaultDetached, "%s%s is detached: nothing runs at %s", linkPrefix, name, is), true
		default:
			c.links = append(c.links, checked{i, name, is, uint32(info.Program)})
		}
		if was.Kind == targetTCX || was.Kind == targetXDP {
			f.Device = deviceName(was.Where)
		}
	})
	if !bad && !c.owns(i, dir, info) {
		f, bad = fault(i, FaultProgram, "%s%s runs foreign program %d %q", linkPrefix, name, info.Program, programName(uint32(info.Program))), true
	}
	return f, bad
}

// orName names the target. If the target is unknown, it names the hook by the link.
func (r linkRecord) orName(name string) string {
	if r.Kind == "" {
		return "the hook of " + name
	}
	return r.String()
}

// detached reports whether a detached link is a fault: its namespace or device still exists.
func detached(i Instance, name string, was linkRecord, known bool, ns *netns.Handle) bool {
	if i.Scope != HostScope && ns == nil {
		return false // gone with its namespace
	}
	if known {
		return was.exists(ns)
	}
	if index, err := strconv.Atoi(strings.TrimLeft(name, "abcdefghijklmnopqrstuvwxyz_")); err == nil {
		return target{Kind: targetTCX, Where: uint64(index)}.exists(ns)
	}
	return true
}

// inSpace runs f in a namespace, or in the current one if ns is nil or cannot be entered.
func inSpace(ns *netns.Handle, f func()) {
	if ns == nil || ns.Do(func() error { f(); return nil }) != nil {
		f()
	}
}

// owns reports whether a link's program belongs to the instance, or cannot be read. With dir, the instance's directory,
// it uses the cached answer until pins change. Opening all maps each second would cost more than the rest of a check.
func (c *Checker) owns(i Instance, dir os.FileInfo, info *link.Info) bool {
	if dir == nil || time.Since(dir.ModTime()) < oldEnough {
		own, known := c.usesMap(i, info.Program)
		return own || !known
	}
	st := dir.Sys().(*syscall.Stat_t)
	q := ownership{st.Ino, st.Mtim, info.ID, info.Program}
	own, known := c.owned[q]
	if !known {
		own, known = c.usesMap(i, info.Program)
	}
	if known {
		c.asked[q] = own
	}
	return own || !known
}

// oldEnough is the minimum age of a directory's time stamp. A later change then gets another one, despite the kernel's
// clock ticks.
const oldEnough = time.Second

// usesMap reports whether a program uses a map of the instance. known is false if that is unreadable.
func (c *Checker) usesMap(i Instance, program ebpf.ProgramID) (yes, known bool) {
	p, err := ebpf.NewProgramFromID(program)
	if err != nil {
		return false, false
	}
	defer p.Close()
	pi, err := p.Info()
	if err != nil {
		return false, false
	}
	uses, _ := pi.MapIDs()
	pins, err := confined.Names(c.root.dir(i), mapPrefix)
	if err != nil {
		return false, false
	}
	for _, name := range pins {
		m, err := confined.LoadMap(c.root.path, filepath.Join(c.root.dir(i), mapPrefix+name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			continue
		}
		mi, err := m.Info()
		m.Close()
		if err != nil {
			continue
		}
		known = true
		if id, _ := mi.ID(); slices.Contains(uses, id) {
			return true, true
		}
	}
	return false, known
}

// ahead finds foreign programs at the hooks of this root's links.
func (c *Checker) ahead() (out []Fault) {
	told := map[string]bool{}
	for _, ln := range c.links {
		ns := c.space(ln.instance.Scope)
		if ns == nil && ln.target.Kind != targetCgroup {
			continue
		}
		if p, err := confined.LoadLink(c.root.path, filepath.Join(c.root.dir(ln.instance), linkPrefix+ln.name)); err == nil {
			if info, err := p.Info(); err == nil { // it may have changed since the check
				ln.program = uint32(info.Program)
			}
			p.Close()
		}
		inSpace(ns, func() {
			for _, text := range ln.target.ahead(ns, ln.program, c.ours) {
				if told[ln.instance.Scope+text] {
					continue
				}
				told[ln.instance.Scope+text] = true
				f := fault(ln.instance, FaultAhead, "%s", text)
				f.Remedy = "find its owner with bpftool link show, bpftool net show and bpftool cgroup tree"
				if ln.target.Kind == targetTCX {
					f.Device = deviceName(ln.target.Where)
				}
				out = append(out, f)
			}
		})
	}
	return out
}

// Damaged returns the damaged instances, each once. weir's own instances come before the services' instances.
func Damaged(faults []Fault) (out []Instance) {
	for _, f := range faults {
		if f.Damage() && f.Instance != (Instance{}) && !slices.Contains(out, f.Instance) {
			out = append(out, f.Instance)
		}
	}
	slices.SortStableFunc(out, func(a, b Instance) int { return strings.Compare(own(a), own(b)) })
	return out
}

func own(i Instance) string {
	if strings.HasPrefix(i.Name, "@") {
		return "0"
	}
	return "1"
}

// Errors of the root's file system.
var (
	// ErrCovered is returned if another file system is mounted over the root's.
	ErrCovered = errors.New("another file system is mounted over weir's pins")
	// ErrReadOnly is returned if the root's file system is mounted read-only.
	ErrReadOnly = errors.New("the BPF file system is mounted read-only")
)
