// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"testing"

	"github.com/weir-project/weir/internal/strictyaml"
)

func FuzzConfig(f *testing.F) {
	f.Add([]byte("devices: [eth0]\nlisten: 10.2.0.1:7946\ntls: {certificate: a, key: b, ca: c}\nservices:\n  bmp: {number: 0, listen: [tcp 192.0.2.1:1790]}\nbackends:\n  a: {number: 1, address: 10.2.0.2}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseConfig("x", b); err == nil && c == nil {
			t.Error("neither a configuration nor an error")
		}
	})
}

// parseConfig parses the section's text as a file of that name.
func parseConfig(file string, text []byte) (*Config, error) {
	c := &Config{Name: Name}
	if err := strictyaml.Decode(file, text, c); err != nil {
		return nil, err
	}
	return c, errors.Join(c.Validate()...)
}
