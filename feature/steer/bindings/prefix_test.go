// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"strings"
	"testing"
)

// TestParsePrefix: a binding takes exactly the written addresses, or is rejected.
func TestParsePrefix(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.0/24":          "192.0.2.0/24",
		"192.0.2.7":             "192.0.2.7/32",
		"2001:db8::/32":         "2001:db8::/32",
		"2001:db8::1":           "2001:db8::1/128",
		"::ffff:192.0.2.0/120":  "192.0.2.0/24",
		"::ffff:192.0.2.7":      "192.0.2.7/32",
		"0.0.0.0/0":             "0.0.0.0/0",
		"192.0.2.7/24":          "write 192.0.2.0/24, or 192.0.2.7 for the single address",
		"::ffff:192.0.2.7/120":  "write 192.0.2.0/24, or 192.0.2.7 for the single address",
		"2001:db8::1/32":        "write 2001:db8::/32, or 2001:db8::1 for the single address",
		"fe80::1%lo":            "zones are not supported: leave out %lo",
		"::ffff:192.0.2.7%eth0": "zones are not supported: leave out %eth0",
		"192.0.2.0/33":          "is not an address or prefix",
		"fe80::%lo/64":          "zones are not supported: leave out %lo",
		"localhost":             "is not an address or prefix",
		"":                      "is not an address or prefix",
	} {
		p, err := ParsePrefix(text)
		got := p.String()
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
