// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Name is the feature, and the default name of a load balancer.
const Name = "lb"

// OnlyName returns the common name of load balancers, [Name] without any.
func OnlyName(names map[string]bool) (string, error) {
	sorted := slices.Sorted(maps.Keys(names))
	switch len(sorted) {
	case 0:
		return Name, nil
	case 1:
		return sorted[0], nil
	}
	return "", fmt.Errorf("there are several load balancers: name one of %s", strings.Join(sorted, ", "))
}
