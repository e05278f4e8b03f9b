// SPDX-License-Identifier: Apache-2.0

package feature

import "strings"

// Gauge is what metrics say of something that is so or is not: 1 or 0.
func Gauge(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// Once tells a collector which of its objects it may export: Prometheus refuses a
// whole scrape with two of the same labels. There are two where a namespace went and
// another of its name came, until the former's pins are removed, and no label tells
// them apart. The zero value is ready, for one scrape.
type Once struct{ seen map[string]bool }

// First says whether these labels come for the first time.
func (o *Once) First(labels ...string) bool {
	id := strings.Join(labels, "\x00")
	if o.seen[id] {
		return false
	}
	if o.seen == nil {
		o.seen = map[string]bool{}
	}
	o.seen[id] = true
	return true
}
