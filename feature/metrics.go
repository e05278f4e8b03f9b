// SPDX-License-Identifier: Apache-2.0

package feature

import "strings"

// Gauge converts a condition to a metric value, 1 or 0.
func Gauge(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// Once detects objects with duplicate labels, because Prometheus rejects a whole scrape with duplicates. They occur when
// a namespace is replaced by another of its name: until the old pins are removed, no label tells them apart. The zero
// value is ready, for one scrape.
type Once struct{ seen map[string]bool }

// First reports whether these labels are new.
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
