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

// TestCheckUnicast: a binding without effect is rejected. A large prefix may contain such addresses.
func TestCheckUnicast(t *testing.T) {
	for text, rejected := range map[string]bool{
		"224.0.0.1": true, "224.0.0.0/4": true, "239.1.0.0/16": true, "255.255.255.255": true,
		"ff02::1": true, "ff00::/8": true, "fe80::1": true, "fe80::/10": true,
		"0.0.0.0/0": false, "224.0.0.0/3": false, "::/0": false, "fe00::/7": false,
		"10.9.0.255": false, "169.254.1.1": false, "127.0.0.1": false, "2001:db8::1": false, "fc00::1": false,
	} {
		p, err := ParsePrefix(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := CheckUnicast(p); (err != nil) != rejected {
			t.Errorf("%s: %v", text, err)
		}
	}
}
