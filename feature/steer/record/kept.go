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

// Kept lists the entries of unreadable services in the maps of their engine. Changes of other services do not
// overwrite, remove or reuse these entries. The zero value keeps nothing.
type Kept struct {
	Names []string // the services

	ids, rows     map[uint32]bool
	anyID, anyRow bool // some are unknown: any id or row without a readable service may be kept
	freed         map[uint32]bool
	freedRows     map[uint32]bool
}

// ReadKept finds the entries of unreadable services in an engine. The service's own map lists them: the engine's
// program and this version read it alike, even if the meta is of another version. A service without that map may have
// any entry.
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
				k.anyRow = k.anyRow || v.Flags&flagGenerations != 0 // only the meta has the spare rows
				return
			}
		}
	}
	k.Names = append(k.Names, i.Name)
	k.anyID, k.anyRow = true, true
}

// ofAnother reports whether another engine of the namespace refers to a service's own map.
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

// Again returns k after the repair or removal of an unreadable service.
func (k Kept) Again(l *kernel.WriteLock, engine *kernel.Opened, unread instances.Unreadable) Kept {
	now := ReadKept(l, engine, unread)
	now.freed, now.freedRows = k.freed, k.freedRows
	return now
}

// Free records that this command removes or replaces a service, so its previous entries are not kept.
func (k *Kept) Free(p *Service) {
	if len(k.Names) == 0 {
		return
	}
	k.freed[p.ID] = true
	for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
		k.freedRows[row] = true
	}
}

// ID reports whether id is kept. The caller has checked that no readable service uses it.
func (k *Kept) ID(id uint32) bool { return k.ids[id] || k.anyID && !k.freed[id] }

// Row reports whether row is kept. The caller has checked that no readable service uses it.
func (k *Kept) Row(row uint32) bool { return k.rows[row] || k.anyRow && !k.freedRows[row] }

// HasName reports whether k contains the service name.
func (k *Kept) HasName(name string) bool {
	for _, n := range k.Names {
		if n == name {
			return true
		}
	}
	return false
}

// CheckID returns an error if kept ids are unknown, so none can be allocated.
func (k *Kept) CheckID() error { return k.check(k.anyID, "a number") }

// CheckRows returns an error if kept rows are unknown, so none can be allocated.
func (k *Kept) CheckRows() error { return k.check(k.anyRow, "slots") }

func (k *Kept) check(unknown bool, what string) error {
	if !unknown {
		return nil
	}
	return fmt.Errorf("cannot allocate %s beside unreadable services (weir status shows the reason; weir remove steer removes all services): %s", what, strings.Join(k.Names, ", "))
}

// ContainsMap reports whether the map of maps outer contains inner at an index.
func ContainsMap(outer *ebpf.Map, at uint32, inner *ebpf.Map) (bool, error) {
	info, err := inner.Info()
	if err != nil {
		return false, err
	}
	want, _ := info.ID()
	var have ebpf.MapID
	return outer.Lookup(at, &have) == nil && have == want, nil
}
