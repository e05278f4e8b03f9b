// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"

	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/table/bpf"
	"github.com/weir-project/weir/table"
)

// needLoop reports whether this kernel can run a million lookups in one program.
func needLoop() error {
	err := features.HaveProgramHelper(ebpf.XDP, asm.FnLoop)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("this kernel has no bpf_loop (Linux 5.17); the experiment needs it, the table does not: %w", err)
	}
	return err
}

// The ways to find a key, and the modes of lookups: parts of the program names.
const (
	ours        = "table"
	theirs      = "trie"
	touch       = "touch" // no lookup: reads one line of the table's
	latency     = "latency"
	independent = "independent"
)

// bench is one table and one LPM_TRIE with the programs for both.
type bench struct {
	family  family
	spec    *ebpf.CollectionSpec
	c       *kernel.Collection
	maps    table.Maps
	table   *table.Table
	trie    *ebpf.Map
	keys    *ebpf.Memory
	answers *ebpf.Memory
	probes  *ebpf.Memory
}

// load creates empty maps for a number of prefixes; the table has this many segments. Each family and size
// has its own maps, because unused memory would be counted, and freed.
func load(f family, prefixes, segments int) (*bench, error) {
	spec, err := bpf.LoadBench()
	if err != nil {
		return nil, err
	}
	if err := table.Size(spec, "bench", segments); err != nil {
		return nil, err
	}
	trie := fmt.Sprintf("%s%d", theirs, f)
	spec.Maps[trie].MaxEntries = uint32(prefixes)
	spec.Maps["keys"].MaxEntries = uint32(keyCount * f.words() / 16)
	programs := []string{fmt.Sprintf("check%d", f), fmt.Sprintf("probe%d", f)}
	for _, way := range []string{ours, theirs} {
		programs = append(programs, program(way, f, latency), program(way, f, independent))
	}
	programs = append(programs, program(touch, f, latency))
	b := &bench{family: f, spec: spec}
	if b.c, err = kernel.Load(spec, programs, nil); err != nil {
		return nil, err
	}
	b.trie = b.c.Maps[trie]
	if err := b.open(); err != nil {
		b.c.Close()
		return nil, err
	}
	return b, nil
}

func (b *bench) open() error {
	for name, m := range map[string]**ebpf.Memory{"keys": &b.keys, "answers": &b.answers, "probes": &b.probes} {
		var err error
		if *m, err = b.c.Maps[name].Memory(); err != nil {
			return fmt.Errorf("map %s into memory: %w", name, err)
		}
	}
	var err error
	if b.maps, err = table.Find(b.c.Maps, "bench"); err != nil {
		return err
	}
	b.table, err = table.Open(b.maps)
	return err
}

func program(way string, f family, mode string) string { return fmt.Sprintf("%s%d_%s", way, f, mode) }

// close may be called after some of it is closed.
func (b *bench) close() {
	if b.table != nil {
		b.table.Close()
	}
	b.c.Close()
}

// found holds a program's results for its lookups.
type found struct {
	ns             float64 // for one lookup
	checksum, hits uint64
}

// run makes a program look up n keys, beginning with key number start.
func (b *bench) run(name string, start, n int) (found, error) {
	for variable, v := range map[string]uint32{"lookups": uint32(n), "start": uint32(start), "dependence": 0,
		"touch_lines": uint32(b.table.Stats().PageBytes / 64)} {
		if err := b.c.Variables[variable].Set(v); err != nil {
			return found{}, fmt.Errorf("set %s: %w", variable, err)
		}
	}
	if _, err := b.c.Programs[name].Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil {
		return found{}, fmt.Errorf("run %s: %w", name, err)
	}
	var ns, checksum, hits uint64
	for variable, v := range map[string]*uint64{"nanoseconds": &ns, "checksum": &checksum, "hits": &hits} {
		if err := b.c.Variables[variable].Get(v); err != nil {
			return found{}, fmt.Errorf("read %s: %w", variable, err)
		}
	}
	return found{float64(ns) / float64(n), checksum, hits}, nil
}

// rawBytes returns words as bytes in native order, for the programs.
func rawBytes(words []uint32) []byte {
	if len(words) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 4*len(words))
}

func (b *bench) setKeys(keys []uint32) error {
	if _, err := b.keys.WriteAt(rawBytes(keys), 0); err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	return nil
}

// trieKey returns a prefix in the format of LPM_TRIE: its length, and the address in network byte order.
func trieKey(e table.Entry) []byte {
	return append(binary.NativeEndian.AppendUint32(nil, uint32(e.Prefix.Bits())), e.Prefix.Addr().AsSlice()...)
}

// batch holds entries in the format of a batch update, to time only the system call.
type batch struct {
	keys4  [][8]byte
	keys6  [][20]byte
	values []uint32
}

func newBatch(f family, entries []table.Entry) batch {
	var b batch
	for _, e := range entries {
		if f == v4 {
			b.keys4 = append(b.keys4, [8]byte(trieKey(e)))
		} else {
			b.keys6 = append(b.keys6, [20]byte(trieKey(e)))
		}
		b.values = append(b.values, e.Value)
	}
	return b
}

func (a batch) fill(m *ebpf.Map) error {
	var keys any = a.keys4
	if a.keys6 != nil {
		keys = a.keys6
	}
	if _, err := m.BatchUpdate(keys, a.values, nil); err != nil {
		return fmt.Errorf("fill LPM_TRIE: %w", err)
	}
	return nil
}

// tableMemory returns the kernel's charge for the three maps of the table.
func (b *bench) tableMemory() (float64, error) {
	total := uint64(0)
	for _, m := range []*ebpf.Map{b.maps.Head, b.maps.Index, b.maps.Pages} {
		info, err := m.Info()
		if err != nil {
			return 0, err
		}
		bytes, ok := info.Memlock()
		if !ok {
			bytes = uint64(m.MaxEntries()) * uint64(m.ValueSize())
		}
		total += bytes
	}
	return float64(total) / 1e6, nil
}
