// SPDX-License-Identifier: Apache-2.0

package table

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// A perfect hash finds the page of an IPv6 address's first 32 bits in one step: a displacement for each bucket of keys,
// chosen so that every key has a slot of its own. The page's tag says whether the key is there at all. A new key whose
// slot is taken moves its bucket: the entries are copied to where the new displacement leads, then one 16-bit store
// switches readers over, and the old slots are cleared after a grace period.

const (
	fewestSlots = 1 << 10
	mostSlots   = 1 << slotBits
	// mostKeys keeps displacements easy to find; keys beyond it go the long way, through the root.
	mostKeys = mostSlots * 2 / 3
)

// buckets are the keys of each bucket, which only a change that moves one needs: they are gathered when one does.
type buckets [][]uint32

// mix is table_mix.
func mix(key uint32) uint64 {
	h := uint64(key) * 0x9E3779B97F4A7C15
	h ^= h >> 29
	h *= 0xBF58476D1CE4E5B9
	return h ^ h>>32
}

func (t *index) bucket(key uint32) uint64 { return mix(key) >> t.BucketShift }

func (t *index) slot(key uint32, displacement uint16) uint32 {
	h := mix(key)
	return (uint32(h) + uint32(displacement)*(uint32(h>>20)|1)) & t.SlotMask
}

func (t *index) slotOf(key uint32) uint32 { return t.slot(key, t.Displacement[t.bucket(key)]) }

// shape sizes an empty hash for so many keys: two thirds full at most, with 1.3 keys a bucket. Buckets of ten find no
// place.
func (t *index) shape(keys int) {
	slots := max(fewestSlots, 1<<bits.Len(uint(keys*3/2)))
	slots = min(slots, mostSlots)
	t.SlotMask = uint32(slots - 1)
	t.BucketShift = uint32(64 - min(bits.Len(uint(slots))-2, bucketBits))
	clear(t.Slot[:])
	clear(t.Displacement[:])
}

// room says whether the hash is not yet so full that a larger one is due.
func (t *index) room(keys uint32) bool { return keys < (t.SlotMask+1)*2/3 }

// group returns the entry of a key, 0 if it has none.
func (m *memory) group(t *index, key uint32) uint32 {
	e := t.Slot[t.slotOf(key)]
	if e == 0 || *m.word(of(e), 1) != key {
		return 0
	}
	return e
}

// place gives a key that is new its slot. It returns false if no displacement does.
func (m *memory) place(t *index, key, entry uint32) bool {
	b := t.bucket(key)
	if s := &t.Slot[t.slot(key, t.Displacement[b])]; *s == 0 {
		atomic.StoreUint32(s, entry)
		if m.buckets != nil {
			m.buckets[b] = append(m.buckets[b], key)
		}
		return true
	}
	if m.buckets == nil {
		m.gather(t)
	}
	if m.displace(t, b, key, entry) {
		return true
	}
	if len(m.vacated) == 0 {
		return false
	}
	m.grace()
	return m.displace(t, b, key, entry)
}

// gather reads which keys each bucket has.
func (m *memory) gather(t *index) {
	m.buckets = make(buckets, 1<<(64-t.BucketShift))
	for s := range t.SlotMask + 1 {
		if key, ok := m.keyAt(t, s); ok {
			m.buckets[t.bucket(key)] = append(m.buckets[t.bucket(key)], key)
		}
	}
}

// keyAt returns the key in a slot. One that keys moved from may still lead to memory that is another page's by now.
func (m *memory) keyAt(t *index, s uint32) (key uint32, ok bool) {
	e := t.Slot[s]
	if e == 0 {
		return 0, false
	}
	if _, gone := m.vacated[s]; gone && !m.unread {
		return 0, false
	}
	return *m.word(of(e), 1), true
}

// displace finds another displacement for a bucket and a new key.
func (m *memory) displace(t *index, b uint64, key, entry uint32) bool {
	keys := append(m.buckets[b][:len(m.buckets[b]):len(m.buckets[b])], key)
	old := t.Displacement[b]
	to := make([]uint32, len(keys))
next:
	for d := range 1 << 16 {
		for i, k := range keys {
			to[i] = t.slot(k, uint16(d))
			if t.Slot[to[i]] != 0 {
				continue next
			}
			for _, other := range to[:i] {
				if other == to[i] {
					continue next
				}
			}
		}
		for i, k := range keys[:len(keys)-1] {
			from := t.slot(k, old)
			atomic.StoreUint32(&t.Slot[to[i]], t.Slot[from])
			if m.unread {
				t.Slot[from] = 0
			} else {
				m.vacated[from] = k
			}
		}
		atomic.StoreUint32(&t.Slot[to[len(keys)-1]], entry)
		storeDisplacement(t, b, uint16(d))
		m.buckets[b] = keys
		return true
	}
	return false
}

// storeDisplacement stores one displacement at once. Go has no 16-bit store that is atomic by its word; the
// 32-bit one that covers it writes its neighbour's bits as they are, and there is one writer.
func storeDisplacement(t *index, b uint64, d uint16) {
	pair := (*uint32)(unsafe.Pointer(&t.Displacement[b&^1]))
	both := [2]uint16{t.Displacement[b&^1], t.Displacement[b|1]}
	both[b&1] = d
	atomic.StoreUint32(pair, *(*uint32)(unsafe.Pointer(&both)))
}

// clearVacated clears the slots that keys moved from, once nobody reads them. It must come before any memory of pages is
// used again: what such a slot leads to would be another key's, or, worse, would have been.
func (m *memory) clearVacated() {
	for s := range m.vacated {
		atomic.StoreUint32(&m.index[m.active6()].Slot[s], 0)
	}
	clear(m.vacated)
}

// take removes a key.
func (m *memory) take(t *index, key uint32) {
	atomic.StoreUint32(&t.Slot[t.slotOf(key)], 0)
	for s, k := range m.vacated {
		if k == key { // its bucket may move again, and have it look there
			atomic.StoreUint32(&t.Slot[s], 0)
			delete(m.vacated, s)
		}
	}
	if m.buckets == nil {
		return
	}
	b := t.bucket(key)
	for i, k := range m.buckets[b] {
		if k == key {
			m.buckets[b] = append(m.buckets[b][:i:i], m.buckets[b][i+1:]...)
			return
		}
	}
}

// grow moves all keys to a hash of twice the size, in the other index, and switches readers over. It returns false if
// there is no such size.
func (m *memory) grow() bool {
	from := m.active6()
	old, t := m.index[from], m.index[1-from]
	if old.SlotMask+1 >= mostSlots {
		return false
	}
	m.grace() // nobody reads any more what the other index was before
	t.shape(int(old.SlotMask+1) * 4 / 3)
	m.buckets, m.unread = make(buckets, 1<<(64-t.BucketShift)), true
	defer func() { m.unread = false }()
	for s, e := range old.Slot[:old.SlotMask+1] {
		if key, ok := m.keyAt(old, uint32(s)); ok && !m.place(t, key, e) {
			m.buckets = nil
			return false
		}
	}
	t.Root6 = old.Root6
	m.Short6[1-from] = m.Short6[from]
	atomic.StoreUint32(&m.Active, m.Active^2)
	return true
}
