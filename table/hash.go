// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
	"unsafe"
)

// A perfect hash finds the page for the first 32 bits of an IPv6 address in one step. Each bucket
// of keys has a displacement, chosen so every key has a slot of its own. The page's tag tells
// whether the key is present. If the slot of a new key is taken, its bucket moves: the entries are
// copied to the slots of the new displacement. Then one 16-bit store switches readers over. The old
// slots are cleared after a grace period.

const (
	minSlots = 1 << 10
	maxSlots = 1 << slotBits
	// maxKeys keeps displacements easy to find. Further keys go the long way, through the root.
	maxKeys = maxSlots * 5 / 6
)

// buckets are the keys of each bucket. Only a move of a bucket needs them and reads them first.
type buckets [][]uint32

// products is the hash of a key: TABLE_HASH1 and TABLE_HASH2 times it.
type products struct{ one, two uint64 }

func hash(key uint32) products {
	return products{uint64(key) * 0x9E3779B97F4A7C15, uint64(key) * 0xBF58476D1CE4E5B9}
}

const minStep = 0x10001 // TABLE_STEP

// maxBucket is the largest bucket with a displacement.
const maxBucket = 64

func (t *index) hashBucket(h products) uint32 { return share(uint32(h.one>>32), t.Buckets) }

func (t *index) slotFor(h products, displacement uint16) uint32 {
	return share(uint32(h.two>>32)+uint32(displacement)*(uint32(h.one)|minStep), t.Slots)
}

func (t *index) bucket(key uint32) uint32 { return t.hashBucket(hash(key)) }

func (t *index) slot(key uint32, displacement uint16) uint32 {
	return t.slotFor(hash(key), displacement)
}

// share maps any number to one below n.
func share(h, n uint32) uint32 { return uint32(uint64(h) * uint64(n) >> 32) }

func (t *index) find(key uint32) uint32 { return t.slot(key, t.Displacement[t.bucket(key)]) }

// shape sizes an empty hash for a number of keys: five sixths full, with two keys a bucket. The
// parts read at random should fit the caches. With larger buckets or fewer slots the last buckets
// would find no place.
func (t *index) shape(keys int) {
	slots := min(max(minSlots, keys*6/5), maxSlots)
	t.Slots, t.Buckets = uint32(slots), uint32(min(slots*5/12, 1<<bucketBits))
	clear(t.Slot[:])
	clear(t.Displacement[:])
}

// room reports whether a key fits before a larger hash is due.
func (t *index) room(keys uint32) bool { return keys < t.Slots/10*9 }

// group returns the entry of a key, 0 if it has none.
func (m *memory) group(t *index, key uint32) uint32 {
	e := t.Slot[t.find(key)]
	if e == 0 || *m.word(of(e), 1) != key {
		return 0
	}
	return e
}

// insert gives a new key its slot. It returns false if no displacement works.
func (m *memory) insert(t *index, key, entry uint32) bool {
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

// gather reads the keys of each bucket.
func (m *memory) gather(t *index) {
	m.buckets = make(buckets, t.Buckets)
	for s := range t.Slots {
		if key, ok := m.keyAt(t, s); ok {
			m.buckets[t.bucket(key)] = append(m.buckets[t.bucket(key)], key)
		}
	}
}

// keyAt returns the key in a slot. It skips vacated slots, because their memory may belong to
// another page by now.
func (m *memory) keyAt(t *index, s uint32) (key uint32, ok bool) {
	e := t.Slot[s]
	if e == 0 {
		return 0, false
	}
	if _, gone := m.vacated[s]; gone {
		return 0, false
	}
	return *m.word(of(e), 1), true
}

// displace finds another displacement for a bucket with a new key.
func (m *memory) displace(t *index, b, key, entry uint32) bool {
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
			m.vacated[from] = k
		}
		atomic.StoreUint32(&t.Slot[to[len(keys)-1]], entry)
		storeDisplacement(t, b, uint16(d))
		m.buckets[b] = keys
		return true
	}
	return false
}

// storeDisplacement stores one displacement atomically. Go has no atomic 16-bit store. The 32-bit
// store writes the neighbour unchanged, which is safe with one writer.
func storeDisplacement(t *index, b uint32, d uint16) {
	pair := (*uint32)(unsafe.Pointer(&t.Displacement[b&^1]))
	both := [2]uint16{t.Displacement[b&^1], t.Displacement[b|1]}
	both[b&1] = d
	atomic.StoreUint32(pair, *(*uint32)(unsafe.Pointer(&both)))
}

// clearVacated clears the vacated slots after a grace period. It must precede any reuse of page
// memory: such a slot would then lead to the page of another key.
func (m *memory) clearVacated() {
	for s := range m.vacated {
		atomic.StoreUint32(&m.index[m.active6()].Slot[s], 0)
	}
	clear(m.vacated)
}

// remove removes a key.
func (m *memory) remove(t *index, key uint32) {
	atomic.StoreUint32(&t.Slot[t.find(key)], 0)
	for s, k := range m.vacated {
		if k == key { // another move of its bucket may read that slot
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

// group is a key of the hash and the entry leading to its page.
type group struct{ key, entry uint32 }

// assignGroups gives all groups of an empty, unpublished hash their slots. The largest buckets come
// first, while most slots are free. It calls homeless for groups without a slot.
func (t *index) assignGroups(groups []group, homeless func(i int)) {
	of, hashes := make([]uint32, len(groups)), make([]products, len(groups))
	first := make([]uint32, t.Buckets+1) // first group of each bucket
	for i, g := range groups {
		hashes[i] = hash(g.key)
		of[i] = t.hashBucket(hashes[i])
		first[of[i]+1]++
	}
	largest := uint32(0)
	for b := range t.Buckets {
		largest = max(largest, first[b+1])
		first[b+1] += first[b]
	}
	members, filled := make([]uint32, len(groups)), make([]uint32, t.Buckets)
	for i, b := range of {
		members[first[b]+filled[b]] = uint32(i)
		filled[b]++
	}
	for size := min(largest, maxBucket+1); size > 0; size-- {
		for b := range t.Buckets {
			if min(filled[b], maxBucket+1) == size {
				t.assignBucket(groups, members[first[b]:first[b+1]], hashes, b, homeless)
			}
		}
	}
}

// assignBucket finds a displacement for the groups of one bucket.
func (t *index) assignBucket(groups []group, members []uint32, hashes []products, b uint32, homeless func(i int)) {
	var to [maxBucket]uint32
	if len(members) > maxBucket {
		for _, i := range members {
			homeless(int(i))
		}
		return
	}
next:
	for d := range 1 << 16 {
		for n, i := range members {
			s := t.slotFor(hashes[i], uint16(d))
			if t.Slot[s] != 0 || slices.Contains(to[:n], s) {
				continue next
			}
			to[n] = s
		}
		for n, i := range members {
			t.Slot[to[n]] = groups[i].entry
		}
		t.Displacement[b] = uint16(d)
		return
	}
	last := len(members) - 1
	homeless(int(members[last]))
	t.assignBucket(groups, members[:last], hashes, b, homeless)
}

// grow moves all keys to a hash a third larger in the other index and switches readers over. It
// returns false if the hash cannot grow.
func (m *memory) grow() bool {
	from := m.active6()
	old, t := m.index[from], m.index[1-from]
	if old.Slots >= maxSlots {
		return false
	}
	m.grace() // no reader uses the other index any more
	t.shape(int(old.Slots) * 10 / 9)
	var all []group
	for s := range old.Slots {
		if key, ok := m.keyAt(old, s); ok {
			all = append(all, group{key, old.Slot[s]})
		}
	}
	whole := true
	t.assignGroups(all, func(int) { whole = false })
	if !whole {
		return false
	}
	m.buckets = nil
	t.Root6 = old.Root6
	m.Short6[1-from] = m.Short6[from]
	atomic.StoreUint32(&m.Active, m.Active^2)
	return true
}
