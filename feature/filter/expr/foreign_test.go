// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"regexp"
	"testing"
)

var fieldNames = regexp.MustCompile(`[a-z0-9]+(\.[a-z_]+)+`)

// What is a field here is not foreign, and hints name fields that are.
func TestForeign(t *testing.T) {
	for name, hint := range foreign {
		if byName[name] != nil {
			t.Errorf("%s is a field, and not foreign", name)
		}
		for _, w := range fieldNames.FindAllString(hint, -1) {
			if byName[w] == nil {
				t.Errorf("the hint for %s names %s, which is no field", name, w)
			}
		}
	}
}
