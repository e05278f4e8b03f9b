// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"testing"

	"github.com/weir-project/weir/internal/releasetest"
)

// This version reads the state of a session from every release, and writes the same bytes again.
func TestStatesOfReleases(t *testing.T) {
	releasetest.Messages(t, "state.json", map[string][]byte{"every field": marshal(t, example()), "tls": marshal(t, exampleTLS())}, func(b []byte) (any, error) {
		s, err := Parse(b)
		if err == nil && !bytes.Equal(marshal(t, s), b) {
			t.Error("it is written in another form")
		}
		return s, err
	})
}
