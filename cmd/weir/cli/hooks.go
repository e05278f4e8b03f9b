// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/weir-project/weir/internal/hookorder"
	fmt "github.com/weir-project/weir/internal/printable"
)

// AtHook is a position behind the name of its hook; "" where it cannot be seen.
func AtHook(p *hookorder.Position) string {
	if p == nil {
		return ""
	}
	return ": " + p.String()
}

// PrintBeside tells of programs of others at the hooks of an object.
func PrintBeside(w io.Writer, object string, at ...hookorder.Position) {
	for _, p := range at {
		if p.Of > 1 {
			fmt.Fprintf(w, "%s: %s: %s\n", object, p.Hook, p)
		}
	}
}
