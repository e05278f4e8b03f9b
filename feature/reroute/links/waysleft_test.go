// SPDX-License-Identifier: Apache-2.0

package links

import (
	"strings"
	"testing"
)

// Packets are dropped if repairs exist for their IP version and none is usable. The remedy covers all reasons.
func TestWaysLeft(t *testing.T) {
	type repair struct {
		v4, v6  bool
		against Reason
	}
	for name, c := range map[string]struct {
		repairs []repair
		dropped string
		remedy  []string
	}{
		"no repair":            {nil, "", nil},
		"usable":               {[]repair{{false, true, 0}}, "", nil},
		"the second is usable": {[]repair{{false, true, Carrier}, {true, true, 0}}, "", nil},
		"all are down":         {[]repair{{false, true, Carrier}, {true, true, Drain}}, "IPv4 IPv6", []string{"firewall", "undrain", "carrier"}},
		"of IPv6 alone":        {[]repair{{false, true, Probe}}, "IPv6", []string{"udp/3784", "weir apply --allow-outage"}},
		"usable by IPv6 alone": {[]repair{{false, true, 0}, {true, false, Probe}}, "IPv4", []string{"udp/3784"}},
	} {
		l := WaysLeft{Reasons: Probe}
		for _, r := range c.repairs {
			l.Add(r.v4, r.v6, r.against)
		}
		if got := strings.Join(l.Dropped(), " "); got != c.dropped {
			t.Errorf("%s: %q are dropped, want %q", name, got, c.dropped)
		}
		got := l.Remedy()
		if (got == "") != (c.remedy == nil) {
			t.Errorf("%s: remedy %q", name, got)
		}
		for _, part := range c.remedy {
			if !strings.Contains(got, part) {
				t.Errorf("%s: remedy %q lacks %q", name, got, part)
			}
		}
	}
}
