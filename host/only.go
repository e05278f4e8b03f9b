// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
)

// CheckOnly refuses names that are no features.
func CheckOnly(names []string) error {
	for _, n := range names {
		if !slices.Contains(Features(), n) {
			return fmt.Errorf("no feature %q: there is %s", n, strings.Join(Features(), ", "))
		}
	}
	return nil
}

// featuresOnly are the features of these names, all where there is none.
func featuresOnly(names []string) []feature.Declared {
	if len(names) == 0 {
		return features
	}
	return slices.DeleteFunc(slices.Clone(features), func(f feature.Declared) bool { return !slices.Contains(names, f.Name) })
}
