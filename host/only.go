// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
)

// CheckOnly rejects unknown feature names.
func CheckOnly(names []string) error {
	for _, n := range names {
		if !slices.Contains(Features(), n) {
			return fmt.Errorf("no feature %q: want one of %s", n, strings.Join(Features(), ", "))
		}
	}
	return nil
}

// featuresOnly returns the features with these names, or all if there are none.
func featuresOnly(names []string) []feature.Declared {
	if len(names) == 0 {
		return features
	}
	return slices.DeleteFunc(slices.Clone(features), func(f feature.Declared) bool { return !slices.Contains(names, f.Name) })
}
