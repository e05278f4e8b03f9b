// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"strings"
)

// ParseBackups writes what was read on a line.
func ParseBackups(text string) (string, error) {
	list, err := parseBackups(text)
	var out []string
	for _, b := range list {
		out = append(out, fmt.Sprintf("%s %v", b.prefix, b.hops))
	}
	return strings.Join(out, "; "), err
}
