// SPDX-License-Identifier: Apache-2.0

// Package ring spreads a service's new flows over backends.
package ring

import (
	"cmp"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
)

// Buckets is how many parts a service's new flows are spread in; each goes to one backend.
const Buckets = 4096

// Share is a backend and its share of new flows.
type Share struct {
	Number uint16
	Name   string // by which buckets are assigned: it stays when numbers change
	Weight int    // 0 for no share
}

// New assigns the buckets to backends by weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash
// tables", 2005): a backend that comes or goes changes no more than its own share, and all load balancers find the same.
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

// score is -weight / ln(u), with u a number between 0 and 1 that only depends on the backend's name and the bucket.
func score(h Share, bucket int) float64 {
	f := fnv.New64a()
	_, _ = f.Write(append(append(strconv.AppendInt(make([]byte, 0, 64), int64(bucket), 10), '/'), h.Name...)) // it does not fail
	x := f.Sum64()                                                                                            // fnv's upper bits are alike for alike words: mixed once more, as splitmix64 does
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	u := (float64(x>>11) + 0.5) / (1 << 53)
	return -float64(h.Weight) / math.Log(u)
}
