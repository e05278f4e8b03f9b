// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// An unset limit has no metric: 0 would mean a limit of 0.
func TestLimitsInMetrics(t *testing.T) {
	for _, c := range []struct{ limit, each Limit }{{1000, 0}, {0, 50}, {1000, 50}} {
		got := map[*prometheus.Desc]float64{}
		GuardState{Limit: c.limit, Each: c.each}.collect(func(d *prometheus.Desc, _ prometheus.ValueType, v float64, _ ...string) { got[d] = v })
		for d, want := range map[*prometheus.Desc]Limit{limitDesc: c.limit, eachDesc: c.each} {
			if v, ok := got[d]; ok != (want != 0) || v != float64(want) {
				t.Errorf("limit %d, each %d: %s is %v, %v", c.limit, c.each, d, v, ok)
			}
		}
	}
}
