// SPDX-License-Identifier: Apache-2.0

// Package ring assigns a service's new flows to backends.
package ring

import (
	"cmp"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
)

// Buckets is the number of buckets of a service. Each belongs to one backend.
const Buckets = 4096

// Share is a backend's share of new flows.
type Share struct {
	Number uint16
	Name   string // key of the hash: stays when numbers change
	Weight int    // 0: no share
}

// New assigns the buckets to backends by weighted rendezvous hashing (Schindelhauer and Schomaker,
// "Weighted distributed hash tables", 2005). A new or removed backend changes no more than its own
// share. All load balancers get the same result.
func New(shares []Share) []uint16 {
	out := make([]uint16, Buckets)
	sorted := slices.SortedFunc(slices.Values(shares), func(a, b Share) int { return cmp.Compare(a.Name, b.Name) })
	for bucket := range out {
		best := math.Inf(-1)
		for _, h := range sorted {
			if h.Weight == 0 {
				continue
			}
			if score := score(h, bucket); score > best {
				best, out[bucket] = score, h.Number
			}
		}
	}
	return out
}

// score is -weight / ln(u). u is a number between 0 and 1 that depends only on the backend's name
// and the bucket.
func score(h Share, bucket int) float64 {
	f := fnv.New64a()
	_, _ = f.Write(append(append(strconv.AppendInt(make([]byte, 0, 64), int64(bucket), 10), '/'), h.Name...)) // never fails
	x := f.Sum64()                                                                                            // fnv's upper bits are similar for similar input: mix once more, as splitmix64 does
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	u := (float64(x>>11) + 0.5) / (1 << 53)
	return -float64(h.Weight) / math.Log(u)
}
