// SPDX-License-Identifier: Apache-2.0

package confined

import (
	"fmt"
	"iter"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
)

// Claim decides by programs whether a map belongs to an instance. A program uses the same maps from its load to its end,
// so nobody can forge this.
type Claim struct {
	maps     map[ebpf.ProgramID][]ebpf.MapID // of all programs of the host
	programs map[ebpf.ProgramID]bool         // of the instance
	all      bool                            // maps is complete
}

// NewClaim returns the claim of the instance pinned in dir, below base, to some maps. Its programs are the programs of its
// links, and the programs with one of its maps. Each map of them adds more programs.
func NewClaim(base, dir string, some iter.Seq[ebpf.MapID]) *Claim {
	c := &Claim{programs: map[ebpf.ProgramID]bool{}}
	c.maps, c.all = programMaps()
	names, _ := Names(dir, "link_")
	for _, name := range names {
		ln, err := LoadLink(base, filepath.Join(dir, "link_"+name))
		if err != nil {
			continue
		}
		if info, err := ln.Info(); err == nil {
			c.programs[info.Program] = true
		}
		ln.Close()
	}
	names, _ = Names(dir, "map_")
	for _, name := range names {
		m, err := LoadMap(base, filepath.Join(dir, "map_"+name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			continue
		}
		if info, err := m.Info(); err == nil {
			id, _ := info.ID()
			c.add(id)
		}
		m.Close()
	}
	for was := -1; was != len(c.programs); {
		was = len(c.programs)
		for id := range some {
			if own, _ := c.Of(id); own {
				c.add(id)
			}
		}
	}
	return c
}

// add adds the programs of a map.
func (c *Claim) add(id ebpf.MapID) {
	for program, uses := range c.maps {
		if slices.Contains(uses, id) {
			c.programs[program] = true
		}
	}
}

// Of reports whether a map belongs to the instance. It is undecided (known is false) if no program uses the map, or if
// nothing of the instance is left.
func (c *Claim) Of(id ebpf.MapID) (own, known bool) {
	for program, uses := range c.maps {
		if !slices.Contains(uses, id) {
			continue
		}
		if c.programs[program] {
			return true, true
		}
		known = c.all && len(c.programs) > 0
	}
	return false, known
}

// programMaps returns the maps of each program of the host. all is false if a program is unreadable.
func programMaps() (out map[ebpf.ProgramID][]ebpf.MapID, all bool) {
	out = map[ebpf.ProgramID][]ebpf.MapID{}
	all = true
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if err != nil {
			return out, all
		}
		id = next
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // ended meanwhile
		}
		if info, err := p.Info(); err != nil {
			all = false
		} else {
			out[id], _ = info.MapIDs()
		}
		p.Close()
	}
}

// MapInUse opens a map that a program or process still holds. It rejects a map of another feature or program.
func MapInUse(id ebpf.MapID, named func(string) bool, outside func(ebpf.MapID) bool) (*ebpf.Map, error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, err
	}
	info, err := m.Info()
	if err == nil && (!named(info.Name) || outside(id)) {
		err = fmt.Errorf("map %d %q belongs to another program", id, info.Name)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}
