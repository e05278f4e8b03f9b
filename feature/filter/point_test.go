// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"strings"
	"testing"
)

// A direction under at is an error that names the right key.
func TestDirectionAtPoint(t *testing.T) {
	for text, want := range map[string]string{
		"ingress":    "direction: ingress",
		"egress":     "direction: egress",
		"inbound":    "want prerouting, input",
		"prerouting": "",
	} {
		var p Point
		err := p.UnmarshalText([]byte(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
