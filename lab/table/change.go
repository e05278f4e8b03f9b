// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/table"
)

// update is one change, in the formats of both.
type update struct {
	table.Entry
	delete bool
	key    []byte // for LPM_TRIE
}

// updates draws n changes: values, removals and additions, mixed. No prefix occurs twice.
func updates(entries, more []table.Entry, n int, r *rand.Rand) []update {
	order := r.Perm(len(entries))
	all := make([]update, 0, n)
	for i := range n {
		u := update{Entry: entries[order[i]]}
		switch i % 3 {
		case 0:
			u.Value = value(r)
		case 1:
			u.delete = true
		case 2:
			u.Entry = more[i/3]
		}
		u.key = trieKey(u.Entry)
		all = append(all, u)
	}
	return all
}

// stretch is the number of changes of one before the other's turn.
const stretch = 500

// change makes the same changes to both in turn, and then compares them once more.
func (x *experiment) change(ctx context.Context, b *bench, entries, more []table.Entry) error {
	x.say("%s: %d changes to a million prefixes, by each way", b.family, x.changes)
	r := x.rand("change", b.family)
	all := updates(entries, more, x.changes, r)
	var t timing
	runtime.GC()
	for i := 0; i < len(all); i += stretch {
		part := all[i:min(i+stretch, len(all))]
		if err := timed(&t.table, func() error { return changeTable(b.table, part) }); err != nil {
			return err
		}
		if err := timed(&t.trie, func() error { return changeTrie(b.trie, part) }); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	µs := 1e6 / float64(len(all))
	x.changing[b.family] = timing{t.table * µs, t.trie * µs}

	// Half of the keys are within changed prefixes: a million at random would hardly hit them.
	var changed []table.Entry
	for _, u := range all {
		changed = append(changed, u.Entry)
	}
	keys := keysWithin(b.family, changed, false, r)
	words := b.family.words()
	copy(keys[:x.flipped/2*words], keysWithin(b.family, entries, false, r))
	return x.compare(ctx, b, fmt.Sprintf("%s after %d changes", b.family, len(all)), keys, x.flipped, r)
}

func changeTable(t *table.Table, part []update) error {
	for _, u := range part {
		if !u.delete {
			if err := t.Set(u.Prefix, u.Value); err != nil {
				return fmt.Errorf("set %s: %w", u.Prefix, err)
			}
		} else if existed, err := t.Delete(u.Prefix); err != nil || !existed {
			return fmt.Errorf("delete %s: existed: %t, error: %w", u.Prefix, existed, err)
		}
	}
	return nil
}

// changeTrie passes pointers to the library; it forwards them to the kernel unchanged.
func changeTrie(m *ebpf.Map, part []update) error {
	for i := range part {
		u := &part[i]
		var err error
		if u.delete {
			err = m.Delete(unsafe.Pointer(&u.key[0]))
		} else {
			err = m.Update(unsafe.Pointer(&u.key[0]), unsafe.Pointer(&u.Value), ebpf.UpdateAny)
		}
		if err != nil {
			return fmt.Errorf("LPM_TRIE, %s: %w", u.Prefix, err)
		}
	}
	return nil
}

// free returns both to the kernel, one after the other, and sums the CPU time.
func (x *experiment) free(ctx context.Context, b *bench, tableFirst bool) error {
	x.say("%s: measuring the kernel's work of freeing a million prefixes", b.family)
	for _, p := range b.c.Programs {
		p.Close() // they hold the maps
	}
	m, err := newKernelTime()
	if err != nil {
		if !x.unmeasured {
			x.result.Skip("%v: no measurement of freeing", err)
		}
		x.unmeasured = true
		return nil
	}
	ends := []func() error{
		func() error {
			return m.cost(ctx, &x.freeing.table, func() error {
				return errors.Join(b.table.Close(), b.maps.Head.Close(), b.maps.Index.Close(), b.maps.Pages.Close())
			})
		},
		func() error { return m.cost(ctx, &x.freeing.trie, b.trie.Close) },
	}
	if !tableFirst {
		ends[0], ends[1] = ends[1], ends[0]
	}
	for _, end := range ends {
		if err := end(); err != nil {
			return err
		}
	}
	return nil
}
