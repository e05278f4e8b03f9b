// SPDX-License-Identifier: Apache-2.0

package table

import (
	"sync/atomic"
	"unsafe"
)

// storeDisplacement stores one displacement at once. Go has no 16-bit store that is atomic by its word; the
// 32-bit one that covers it writes its neighbour's bits as they are, and there is one writer.
func storeDisplacement(t *index, b uint64, d uint16) {
	pair := (*uint32)(unsafe.Pointer(&t.Displacement[b&^1]))
	both := [2]uint16{t.Displacement[b&^1], t.Displacement[b|1]}
	both[b&1] = d
	atomic.StoreUint32(pair, *(*uint32)(unsafe.Pointer(&both)))
}
