// SPDX-License-Identifier: Apache-2.0

package audit

import "testing"

// Any output of FRR's vtysh is parsed or rejected without a panic.
func FuzzBackups(f *testing.F) {
	f.Add("IS-IS area 1\n 10.0.0.1/32 10 eth0 10.0.0.2 -\n")
	f.Add(`{"10.0.0.0/24":[{"prefix":"10.0.0.0/24","protocol":"isis","installed":true}]}`)
	f.Fuzz(func(t *testing.T, s string) {
		_, _ = parseBackups(s)
		_, _ = parseZebra([]byte(s))
	})
}
