// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// The layout is the one of bpf/table.h. Each part is described there.
const (
	root4Bits    = 17
	root6Bits    = 16
	slotBits     = 18
	bucketBits   = 17
	segmentBytes = 1 << 20
	slackBytes   = 256
	limboPages   = 8192
	maxSegments  = 32 // a page number has 22 bits and counts units of 8 bytes

	firstPage = 8 // no page has number 0, because 0 in a slot means empty

	magic = 0x77747033 // "wtp3", for this layout
)

// head is struct table_head.
type head struct {
	Active  uint32
	Magic   uint32
	Writing uint32
	Reused  uint32
	Next    uint32
	Units   uint32
	Pages   uint32
	Groups  uint32
	Count   [2]uint32
	InLimbo uint32
	Free    [maxUnits + 1]uint32
	FreeFan [17]uint32
	Limbo   [limboPages]uint32
	Short4  [2][2 << root4Bits]uint32
	Short6  [2][2 << root6Bits]uint32
}

// index is struct table_index.
type index struct {
	Root4        [1 << root4Bits]uint32
	Root6        [1 << root6Bits]uint32
	Slot         [1 << slotBits]uint32
	Displacement [1 << bucketBits]uint16
	Buckets      uint32
	Slots        uint32
}

var (
	// ErrFull reports a table without free pages. Create it with more segments.
	ErrFull = errors.New("table full")
	// ErrValue reports a value outside 1 to MaxValue.
	ErrValue = errors.New("invalid table value")
	// ErrPrefix reports an invalid prefix, or one with bits set behind its length.
	ErrPrefix = errors.New("invalid table prefix")
	// ErrLayout reports maps of another kind, or of another version of the table.
	ErrLayout = errors.New("not a table of this version")
)

// Maps are the three maps of a table: NAME_head, NAME_index and NAME_pages of TABLE_MAPS(NAME).
type Maps struct{ Head, Index, Pages *ebpf.Map }

// Find returns the maps of the table called name.
func Find(maps map[string]*ebpf.Map, name string) (Maps, error) {
	m := Maps{maps[name+"_head"], maps[name+"_index"], maps[name+"_pages"]}
	if m.Head == nil || m.Index == nil || m.Pages == nil {
		return m, fmt.Errorf("%w: a map is missing: want %s_head, %s_index and %s_pages", ErrLayout, name, name, name)
	}
	return m, nil
}

// Size sets the number of 1 MiB segments of the table called name, 1 to 32. Call it before creating
// the maps. The million prefixes of a full Internet table need 8 segments (IPv4) to 10 (IPv6).
// Replace needs as many again.
func Size(spec *ebpf.CollectionSpec, name string, segments int) error {
	m := spec.Maps[name+"_pages"]
	if m == nil {
		return fmt.Errorf("%w: the object has no map %s_pages", ErrLayout, name)
	}
	if segments < 1 || segments > maxSegments {
		return fmt.Errorf("size table to %d segments: want 1 to %d", segments, maxSegments)
	}
	m.MaxEntries = uint32(segments)
	return nil
}

// memory is the mapped maps of a table.
type memory struct {
	*head
	index [2]*index
	pages []byte // segments, each followed by its slack

	wait    func()            // returns when no reader uses unpublished pages any more
	retired []uint32          // by the current change
	buckets buckets           // of the active IPv6 index; nil: not read yet
	vacated map[uint32]uint32 // vacated slots of that index and their keys; readers may still be there
	maps    [][]byte
	mapped  [][]byte // the mapped ones of maps; the rest are copies
}

func mapMemory(m Maps, write bool) (*memory, error) {
	out := &memory{wait: kernel.WaitForPrograms, vacated: map[uint32]uint32{}}
	for _, want := range []struct {
		m       *ebpf.Map
		size    uint32
		entries uint32 // 0: any
	}{
		{m.Head, uint32(unsafe.Sizeof(head{})), 1},
		{m.Index, uint32(unsafe.Sizeof(index{})), 2},
		{m.Pages, segmentBytes + slackBytes, 0},
	} {
		if want.m == nil || want.m.Type() != ebpf.Array || want.m.ValueSize() != want.size || want.entries > 0 && want.m.MaxEntries() != want.entries {
			return nil, fmt.Errorf("%w: %v", ErrLayout, want.m)
		}
	}
	if err := out.mapAll(m, write); err != nil {
		return nil, err
	}
	size := unsafe.Sizeof(index{})
	out.head = (*head)(unsafe.Pointer(&out.maps[0][0]))
	out.index[0] = (*index)(unsafe.Pointer(&out.maps[1][0]))
	out.index[1] = (*index)(unsafe.Pointer(&out.maps[1][size]))
	out.pages = out.maps[2][:int(m.Pages.MaxEntries())*(segmentBytes+slackBytes)]
	return out, nil
}

// begin initializes an empty table in zeroed memory.
func (m *memory) begin() {
	m.Next = firstPage
	m.index[0].shape(0)
	m.index[1].shape(0)
	atomic.StoreUint32(&m.Magic, magic)
}

// mapAll maps head, index and pages, in this order.
func (m *memory) mapAll(maps Maps, write bool) error {
	for _, a := range []*ebpf.Map{maps.Head, maps.Index, maps.Pages} {
		b, mapped, err := mapArray(a, write)
		if err != nil {
			m.unmap()
			return err
		}
		m.maps = append(m.maps, b)
		if mapped {
			m.mapped = append(m.mapped, b)
		}
	}
	return nil
}

func pageAligned(n int) int { return (n + unix.Getpagesize() - 1) &^ (unix.Getpagesize() - 1) }

// mapArray maps the memory of an array. The kernel refuses to map a read-only descriptor, because
// bpf_map_mmap requires a shared mapping. mapArray then returns a copy.
func mapArray(m *ebpf.Map, write bool) (b []byte, mapped bool, err error) {
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	size := int(m.ValueSize()) * int(m.MaxEntries())
	b, err = unix.Mmap(m.FD(), 0, pageAligned(size), prot, unix.MAP_SHARED)
	if err == nil {
		return b, true, nil
	}
	if write || !errors.Is(err, unix.EINVAL) {
		return nil, false, fmt.Errorf("map %v: %w", m, err)
	}
	b = make([]byte, 0, size)
	for i := range m.MaxEntries() {
		value, err := m.LookupBytes(i)
		if err != nil {
			return nil, false, fmt.Errorf("read %v: %w", m, err)
		}
		b = append(b, value...)
	}
	return b, false, nil
}

// maxCopies limits the attempts of a reader without a mapping to copy a changing table.
const maxCopies = 20

// readWord reads the number at an offset of an array's first value.
func readWord(m *ebpf.Map, at uintptr) (uint32, error) {
	value, err := m.LookupBytes(uint32(0))
	if err != nil {
		return 0, fmt.Errorf("read %v: %w", m, err)
	}
	if int(at)+4 > len(value) {
		return 0, fmt.Errorf("%w: %v", ErrLayout, m)
	}
	return *(*uint32)(unsafe.Pointer(&value[at])), nil
}

func (m *memory) unmap() {
	for _, b := range m.mapped {
		_ = unix.Munmap(b) // the address is from our own Mmap
	}
	m.mapped = nil
	m.maps, m.head, m.index, m.pages = nil, nil, [2]*index{}, nil
}
