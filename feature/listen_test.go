// SPDX-License-Identifier: Apache-2.0

package feature

import "testing"

// Two addresses exclude each other as in the kernel.
func TestListenExcludes(t *testing.T) {
	for _, c := range []struct {
		a, b     string
		excludes bool
	}{
		{"127.0.0.1:7946", "127.0.0.1:7946", true},
		{"127.0.0.1:7946", "127.0.0.1:7947", false},
		{"127.0.0.1:7946", "127.0.0.2:7946", false},
		{"127.0.0.1:7946", "0.0.0.0:7946", true},
		{"127.0.0.1:7946", ":7946", true},
		{"127.0.0.1:7946", "[::]:7946", true},
		{"127.0.0.1:7946", "[::1]:7946", false},
		{"[::ffff:127.0.0.1]:7946", "127.0.0.1:7946", true},
		{"0.0.0.0:7946", "[::1]:7946", false},
		{"0.0.0.0:7946", "[::]:7946", true},
		{"[::1]:7946", "[::]:7946", true},
		{"[::1]:7946", "[0:0::1]:7946", true},
		{"127.0.0.1:80", "127.0.0.1:http", true},
		{"127.0.0.1:0", "127.0.0.1:0", false},
		{"localhost:7946", "localhost:7946", true},
		{"localhost:7946", "0.0.0.0:7946", true},
		{"localhost:7946", "192.0.2.1:7946", false},
		{"127.0.0.1", "127.0.0.1", false},
	} {
		for range 2 {
			if got := (Listen{Address: c.a}).Excludes(Listen{Address: c.b}); got != c.excludes {
				t.Errorf("%s and %s: %v, want %v", c.a, c.b, got, c.excludes)
			}
			c.a, c.b = c.b, c.a
		}
	}
}
