// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"os"
	"path/filepath"
	"testing"
)

// The error for a missing filter names the configuration, and the filter if one was given.
func TestFiltersToTryNone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(path, []byte("services: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"": path + " has no filter: its filter: section is a list of them", "sip": path + " has no filter sip: its filter: section is a list of them"} {
		if _, err := filtersToTry(nil, path, name); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", name, err, want)
		}
	}
}
