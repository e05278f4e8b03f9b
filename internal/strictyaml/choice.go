// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"fmt"
	"slices"
	"strings"
)

// Choice sets to, an option with a fixed set of words, from its text. It is the body of the
// option's UnmarshalText. For other text the error begins with name and lists the words in the
// given order, and to is unchanged.
func Choice[T ~string](to *T, text []byte, name string, words ...T) error {
	if slices.Contains(words, T(text)) {
		*to = T(text)
		return nil
	}
	names := make([]string, len(words))
	for i, w := range words {
		names[i] = string(w)
	}
	return fmt.Errorf("%s %q: want %s", name, text, strings.Join(names, ", "))
}
