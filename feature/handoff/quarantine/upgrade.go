// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"context"
	"fmt"
	"maps"
	"net"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// unpinned are the agent's unpinned maps, by their names in the kernel.
var unpinned = map[string]string{"quarantine_pair": "quarantine_pairs", "quarantine_stra": "quarantine_strays"}

// PlanUpgrade plans the replacement of programs of other weir versions.
func PlanUpgrade(r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := Store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if Store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "quarantine of namespace " + rec.Scope, Detail: "programs of another weir version",
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Instance) }})
		}
	}
	return plan, err
}

// upgrade replaces another version's programs by this version's, with the same maps: a running agent continues. The
// meta changes last. After an earlier kill the next upgrade starts over, and meanwhile each packet meets one of the
// two programs.
func upgrade(l *kernel.WriteLock, inst kernel.Instance) error {
	u, err := Store.Open(l, inst)
	if err != nil {
		return err
	}
	defer u.Close()
	if err := u.Netns.Do(func() error { return exchange(l, u) }); err != nil {
		return err
	}
	return Store.Upgrade(l, inst, func() error { return nil }, nil)
}

// exchange replaces the programs of the links, or of the filters if there are none. The caller is in the network
// namespace.
func exchange(l *kernel.WriteLock, u *instances.InUse[[]string]) error {
	names, err := u.Pins.Links()
	if err != nil {
		return err
	}
	buffer := 0
	if i, err := net.InterfaceByName(bufferName); err == nil { // otherwise no agent runs: the next one creates it
		buffer = i.Index
	}
	filters := tcFilters(u.Spec, buffer)
	running, err := attached(u.Pins, names, filters)
	if err != nil {
		return err
	}
	p, err := programs(u.Pins, running, buffer)
	if err != nil {
		return err
	}
	defer p.Close()
	for _, name := range names {
		if name == linkAgain && buffer == 0 {
			continue // its device ended with the agent
		}
		if err := moveLink(u.Pins, name, p.Programs[linkProgram(name)]); err != nil {
			return err
		}
		kernel.Step("backend:moved")
	}
	if len(names) > 0 {
		return nil
	}
	for _, f := range filters {
		name := linkIn
		if f.Ifindex == buffer {
			name = linkAgain
		} else if f.Egress {
			name = linkOut
		}
		if err := f.Attach(p.Programs[linkProgram(name)]); err != nil {
			return err
		}
	}
	l.NoteFilters(u.Instance, filters)
	return nil
}

func moveLink(pins *kernel.Opened, name string, to *ebpf.Program) error {
	ln, err := pins.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := kernel.MoveLink(ln, to); err != nil {
		return fmt.Errorf("move link %s to the new program: %w", name, err)
	}
	return nil
}

// linkProgram returns the name of a link's program.
func linkProgram(link string) string {
	switch {
	case link == linkAgain:
		return "quarantine_again"
	case strings.HasPrefix(link, linkOut):
		return "quarantine_out"
	}
	return "quarantine_in"
}

// tcFilters returns the filters of a quarantine without links.
func tcFilters(devices []string, buffer int) (out []kernel.Clsact) {
	for _, name := range devices {
		if i, err := net.InterfaceByName(name); err == nil { // otherwise it is gone, with its filters
			out = append(out, filterAt(i.Index, false), filterAt(i.Index, true))
		}
	}
	if buffer != 0 {
		out = append(out, filterAt(buffer, false))
	}
	return out
}

// attached returns the ID of a running program, or 0: all use the same maps.
func attached(pins *kernel.Opened, names []string, filters []kernel.Clsact) (uint32, error) {
	for _, name := range names {
		if name == linkAgain {
			continue // its device may be gone
		}
		ln, err := pins.Link(name)
		if err != nil {
			return 0, err
		}
		defer ln.Close()
		return kernel.LinkProgram(ln)
	}
	if len(filters) == 0 {
		return 0, nil
	}
	return filters[0].Program()
}

// programs loads this version's programs with the pinned maps and the agent's.
func programs(pins *kernel.Opened, running uint32, buffer int) (*kernel.Collection, error) {
	spec, err := bpf.LoadQuarantine()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[bpf.QuarantineVarQuarantineBuffer].Set(uint32(buffer)); err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{"quarantine_sessions": pins.Maps[pinSessions], "quarantine_counts": pins.Maps[pinCounts]}
	if running != 0 {
		used, err := kernel.OpenProgramMaps(running)
		if err != nil {
			return nil, err
		}
		defer func() {
			for m := range maps.Values(used) {
				m.Close()
			}
		}()
		for short, name := range unpinned {
			if m := used[short]; m != nil {
				share[name] = m
			}
		}
	}
	return kernel.Load(spec, []string{"quarantine_in", "quarantine_out", "quarantine_again"}, share)
}
