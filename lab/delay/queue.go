// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// item is a packet in transit.
type item struct {
	at       int64 // due time, ns on the line's clock
	n        uint64
	segments int
	buf      []byte
}

// pending holds the packets in transit, the next due first; packets due at the same time leave in order of
// arrival. It is a binary heap. container/heap would allocate for every packet.
type pending struct {
	items []item
	count uint64
	small [][]byte // free buffers
	large [][]byte
}

// Sizes of buffers: a frame of an ordinary MTU, or TCP's largest packet.
const (
	smallBuffer = 2 << 10
	largeBuffer = 66 << 10
)

func (p *pending) buffer(n int) []byte {
	pool, size := &p.small, smallBuffer
	if n > smallBuffer {
		pool, size = &p.large, largeBuffer
	}
	if k := len(*pool); k > 0 {
		b := (*pool)[k-1]
		*pool = (*pool)[:k-1]
		return b[:n]
	}
	return make([]byte, n, size)
}

func (p *pending) free(b []byte) {
	if cap(b) == smallBuffer {
		p.small = append(p.small, b)
	} else {
		p.large = append(p.large, b)
	}
}

func (p *pending) before(i, j int) bool {
	a, b := &p.items[i], &p.items[j]
	return a.at < b.at || a.at == b.at && a.n < b.n
}

func (p *pending) push(at int64, segments int, packet []byte) {
	b := p.buffer(len(packet))
	copy(b, packet)
	p.count++
	p.items = append(p.items, item{at, p.count, segments, b})
	for i := len(p.items) - 1; i > 0; {
		up := (i - 1) / 2
		if !p.before(i, up) {
			return
		}
		p.items[i], p.items[up] = p.items[up], p.items[i]
		i = up
	}
}

// pop removes the next one; return its buffer with free.
func (p *pending) pop() item {
	first, last := p.items[0], len(p.items)-1
	p.items[0] = p.items[last]
	p.items[last] = item{}
	p.items = p.items[:last]
	for i := 0; ; {
		next := 2*i + 1
		if next+1 < last && p.before(next+1, next) {
			next++
		}
		if next >= last || !p.before(next, i) {
			return first
		}
		p.items[i], p.items[next] = p.items[next], p.items[i]
		i = next
	}
}

// histogram counts durations with an error of at most 1/16. One thread adds, others read.
type histogram struct {
	buckets [64 * 16]atomic.Uint64
	largest atomic.Int64
}

func (h *histogram) add(ns int64) {
	ns = max(ns, 0)
	if ns > h.largest.Load() {
		h.largest.Store(ns)
	}
	h.buckets[bucketIndex(uint64(ns))].Add(1)
}

// bucketIndex returns the power of two of a number, with the four bits below its highest.
func bucketIndex(v uint64) int {
	if v < 16 {
		return int(v)
	}
	shift := bits.Len64(v) - 5
	return shift<<4 + int(v>>shift)
}

// bucketTop returns the largest number of a bucket.
func bucketTop(i int) uint64 {
	if i < 32 {
		return uint64(i)
	}
	shift := i>>4 - 1
	return uint64(i&15+17)<<shift - 1
}

// quantile returns the duration not exceeded by a share of all; 0 for none.
func (h *histogram) quantile(q float64) time.Duration {
	var total, seen uint64
	for i := range h.buckets {
		total += h.buckets[i].Load()
	}
	if total == 0 {
		return 0
	}
	rank := uint64(q * float64(total-1))
	for i := range h.buckets {
		if seen += h.buckets[i].Load(); seen > rank {
			return time.Duration(min(int64(bucketTop(i)), h.largest.Load()))
		}
	}
	return time.Duration(h.largest.Load())
}
