// SPDX-License-Identifier: Apache-2.0

package record

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Kept is what services that cannot be read have in the maps of their engine. No change of another service overwrites, removes
// or gives away anything of it. The zero value keeps nothing.
type Kept struct {
	Names []string // the services

	ids, rows     map[uint32]bool
	anyID, anyRow bool // not all of theirs are known: each that no readable service has may be
	freed         map[uint32]bool
	freedRows     map[uint32]bool
}

// ReadKept finds what services that cannot be read have in an engine. A service's own map tells, since the engine's program
// reads it as this weir does: the service's meta may be of any weir. A service without that map may have anything.
func ReadKept(l *kernel.WriteLock, engine *kernel.Opened, unread instances.Unreadable) Kept {
	k := Kept{ids: map[uint32]bool{}, rows: map[uint32]bool{}, freed: map[uint32]bool{}, freedRows: map[uint32]bool{}}
	for _, u := range unread {
		k.add(l, engine, u.Instance)
	}
	return k
}

func (k *Kept) add(l *kernel.WriteLock, engine *kernel.Opened, i kernel.Instance) {
	var v bpf.SteerService
	own, err := l.OpenMap(i, "service")
	if err == nil {
		defer own.Close()
		if own.ValueSize() == uint32(unsafe.Sizeof(v)) && own.Lookup(uint32(0), &v) == nil {
			if ofAnother(l, engine.Instance, v.Id, own) {
				return
			}
			if held, err := ContainsMap(engine.Maps["services"], v.Id, own); err == nil && held {
				k.Names = append(k.Names, i.Name)
				k.ids[v.Id] = true
				for _, row := range v.Row[:min(int(v.Slots), len(v.Row))] {
					k.rows[uint32(row)] = true
				}
				k.anyRow = k.anyRow || v.Flags&flagGenerations != 0 // the spare rows are in the meta alone
				return
			}
		}
	}
	k.Names = append(k.Names, i.Name)
	k.anyID, k.anyRow = true, true
}

// ofAnother tells whether another engine of the namespace leads to a service's own map.
func ofAnother(l *kernel.WriteLock, engine kernel.Instance, id uint32, own *ebpf.Map) bool {
	for _, kind := range Engines {
		i := EngineInstance(engine.Scope, kind)
		if i == engine {
			continue
		}
		services, err := l.OpenMap(i, "services")
		if err != nil {
			continue
		}
		held, err := ContainsMap(services, id, own)
		services.Close()
		if err == nil && held {
			return true
		}
	}
	return false
}

// Again is k after a service could be read again or is gone.
func (k Kept) Again(l *kernel.WriteLock, engine *kernel.Opened, unread instances.Unreadable) Kept {
	now := ReadKept(l, engine, unread)
	now.freed, now.freedRows = k.freed, k.freedRows
	return now
}

// Free notes that this command takes away or replaces a service: nothing of its former form is kept.
func (k *Kept) Free(p *Service) {
	if len(k.Names) == 0 {
		return
	}
	k.freed[p.ID] = true
	for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
		k.freedRows[row] = true
	}
}

// ID tells whether a number that no readable service has is kept.
func (k *Kept) ID(id uint32) bool { return k.ids[id] || k.anyID && !k.freed[id] }

// Row tells whether a row that no readable service has is kept.
func (k *Kept) Row(row uint32) bool { return k.rows[row] || k.anyRow && !k.freedRows[row] }

// HasName tells whether a service of that name is among them.
func (k *Kept) HasName(name string) bool {
	for _, n := range k.Names {
		if n == name {
			return true
		}
	}
	return false
}

// CheckID returns an error where no free number can be told from theirs.
func (k *Kept) CheckID() error { return k.check(k.anyID, "a number") }

// CheckRows returns an error where no free row can be told from theirs.
func (k *Kept) CheckRows() error { return k.check(k.anyRow, "slots") }

func (k *Kept) check(unknown bool, what string) error {
	if !unknown {
		return nil
	}
	return fmt.Errorf("cannot allocate %s beside services that cannot be read (weir status says why; weir remove steer removes all services): %s", what, strings.Join(k.Names, ", "))
}

// ContainsMap tells whether an array of maps has this one at an index.
func ContainsMap(outer *ebpf.Map, at uint32, inner *ebpf.Map) (bool, error) {
	info, err := inner.Info()
	if err != nil {
		return false, err
	}
	want, _ := info.ID()
	var have ebpf.MapID
	return outer.Lookup(at, &have) == nil && have == want, nil
}
