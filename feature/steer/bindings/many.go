// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"errors"
	"slices"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// Diff is the effect of a change of many bindings.
type Diff struct {
	Added   []Binding
	Removed []Binding
	Moved   []Moved
	Same    int
}

// Moved is a binding that changes its service.
type Moved struct {
	Binding
	From string
}

// Empty reports whether nothing changes.
func (x Diff) Empty() bool { return len(x.Added)+len(x.Removed)+len(x.Moved) == 0 }

// ReplaceBindings replaces all bindings of a namespace at once. A packet sees either all old or all new bindings.
func ReplaceBindings(l *kernel.WriteLock, ns *netns.Handle, all []Binding) (Diff, error) {
	return setBindings(l, ns, all, false)
}

// AddBindings adds bindings, all at once.
func AddBindings(l *kernel.WriteLock, ns *netns.Handle, more []Binding) (Diff, error) {
	return setBindings(l, ns, more, true)
}

func setBindings(l *kernel.WriteLock, ns *netns.Handle, want []Binding, keep bool) (diff Diff, err error) {
	order, err := checkBindings(l.Root, record.Scope(ns), want)
	if err != nil {
		return diff, err
	}
	if len(want) == 0 { // nothing to add, so the dispatch need not exist
		d, err := openDispatchThere(l, ns)
		if errors.Is(err, kernel.ErrNotExist) {
			return diff, nil
		} else if err != nil {
			return diff, err
		}
		defer d.Close()
		if diff, err = d.set(want, order, keep); err == nil {
			err = d.removeIdle()
		}
		return diff, err
	}
	err = withRoom(l, ns, roomFor(len(want)), func(d *dispatch) (err error) {
		diff, err = d.set(want, order, keep)
		return err
	})
	return diff, err
}

// set replaces all bindings. With keep it adds to them.
func (d *dispatch) set(want []Binding, order []bindingOrder, keep bool) (diff Diff, err error) {
	have, err := read(d.labels, d.bound)
	if err != nil {
		return diff, err
	}
	diff, kept := have.diff(want, order, keep)
	if diff.Empty() {
		return diff, nil
	}
	return diff, d.change(func() error {
		ids := map[string]uint32{}
		counts := map[uint32]uint32{}
		for _, b := range want {
			if _, ok := ids[b.Service]; ok {
				continue
			}
			x, err := d.acquire(b.Service)
			if err != nil {
				return err
			}
			ids[b.Service] = x.ID
		}
		all := make([]table.Binding, 0, len(want)+len(kept))
		for i, o := range order {
			if i > 0 && o.compare(order[i-1]) == 0 {
				continue
			}
			b := &want[o.at]
			all = append(all, table.Binding{Prefix: b.Prefix, Proto: uint8(b.Proto), Port: b.Port, Value: ids[b.Service] + 1})
		}
		for _, at := range kept {
			all = append(all, have.all[at])
		}
		for _, x := range all {
			counts[x.Value-1]++
		}
		kernel.Step("steer:named all")
		if err := d.bound.Replace(all); err != nil {
			return err
		}
		kernel.Step("steer:bound all")
		return d.count(counts)
	})
}

// boundNow is the current bindings and the names of their services.
type boundNow struct {
	all   []table.Binding
	order []bindingOrder
	names map[uint32]string
}

func read(s *engine.Labels, b *table.Bindings) (out boundNow, err error) {
	out = boundNow{all: make([]table.Binding, 0, b.Len())}
	if out.names, err = s.Names(); err != nil {
		return out, err
	}
	for x, err := range b.All() {
		if err != nil {
			return out, err
		}
		out.all = append(out.all, x)
	}
	out.order = inOrder(len(out.all), func(i int) table.Key { return out.all[i].Key() })
	return out, nil
}

func (n boundNow) binding(at int32) Binding {
	x := n.all[at]
	return Binding{Service: n.names[x.Value-1], Prefix: x.Prefix, Port: x.Port, Proto: Proto(x.Proto)}
}

// diff compares the current bindings with want, sorted by order. Other bindings are removed, or with keep returned.
func (n boundNow) diff(want []Binding, order []bindingOrder, keep bool) (out Diff, kept []int32) {
	was := make([]int32, len(want)) // index of the current binding + 1
	var others []int32
	added, next := len(want), 0
	for _, o := range n.order {
		for ; next < len(order) && order[next].compare(o) <= 0; next++ {
			if order[next].compare(o) == 0 {
				was[order[next].at] = o.at + 1
				added--
			}
		}
		if next == 0 || order[next-1].compare(o) != 0 {
			others = append(others, o.at)
		}
	}
	out.Added = slices.Grow(out.Added, added)
	for i, b := range want {
		if was[i] == 0 {
			out.Added = append(out.Added, b)
		} else if from := n.names[n.all[was[i]-1].Value-1]; from != b.Service {
			out.Moved = append(out.Moved, Moved{b, from})
		} else {
			out.Same++
		}
	}
	if keep {
		return out, others
	}
	out.Removed = slices.Grow(out.Removed, len(others))
	for _, at := range others {
		out.Removed = append(out.Removed, n.binding(at))
	}
	return out, nil
}

// DiffBindings returns the effect of ReplaceBindings, or with keep of AddBindings.
func DiffBindings(r *kernel.Root, scope string, want []Binding, keep bool) (Diff, error) {
	v, err := OpenServices(r, scope)
	if err == nil {
		defer v.Close()
	} else if !errors.Is(err, kernel.ErrNotExist) {
		return Diff{}, err
	}
	return v.Diff(r, scope, want, keep)
}

// Diff is DiffBindings for an open view. A nil view has no bindings.
func (v *View) Diff(r *kernel.Root, scope string, want []Binding, keep bool) (diff Diff, err error) {
	order, err := checkBindings(r, scope, want)
	if err != nil {
		return diff, err
	}
	var now boundNow
	if v != nil {
		if err := v.OpenBound(); err != nil {
			return diff, err
		}
		if keep {
			return v.added(want)
		}
		if now, err = read(v.Labels, v.Bound); err != nil {
			return diff, err
		}
	}
	diff, _ = now.diff(want, order, keep)
	return diff, nil
}

// added compares each wanted binding with the current one of the same key. It reads no other bindings.
func (v *View) added(want []Binding) (diff Diff, err error) {
	var names map[uint32]string
	for _, b := range want {
		value, ok := v.Bound.Get(b.key())
		if !ok {
			diff.Added = append(diff.Added, b)
			continue
		}
		if names == nil {
			if names, err = v.Labels.Names(); err != nil {
				return Diff{}, err
			}
		}
		if from := names[value-1]; from != b.Service {
			diff.Moved = append(diff.Moved, Moved{b, from})
		} else {
			diff.Same++
		}
	}
	return diff, nil
}
