// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature/reroute/protect"
)

// A size that a router on the way told is a metric and a finding, one of the interface is neither.
func TestLearntSizeIsTold(t *testing.T) {
	p := protect.PathState{Name: "core", Netns: "net", Attached: true, Repairs: []protect.RepairState{{Device: "eth1", MTU: 1500}, {Device: "eth2", MTU: 1400, Fits: 1336, Learnt: true}}}
	var sizes []string
	path(p, func(d *prometheus.Desc, _ prometheus.ValueType, v float64, labels ...string) {
		if d == learntDesc {
			sizes = append(sizes, fmt.Sprint(labels, v))
		}
	})
	if !slices.Equal(sizes, []string{"[core net 2] 1400"}) {
		t.Errorf("the metrics are %q", sizes)
	}
	found := learntSizes(p)
	if len(found) != 1 || found[0].Text != "a link on the way of repair 2 takes 1400 bytes at most, less than eth2" {
		t.Errorf("findings: %+v", found)
	}
	p.Repairs[1].MTU, p.Repairs[1].Fits = 1344, 1280
	if found := learntSizes(p); len(found) != 1 || found[0].Remedy != "give that link a larger MTU" {
		t.Errorf("findings of a link that takes less than IPv6 needs: %+v", found)
	}
}
