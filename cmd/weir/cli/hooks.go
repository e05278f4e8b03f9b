// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/weir-project/weir/internal/hookorder"
	fmt "github.com/weir-project/weir/internal/printable"
)

// AtHook formats a position for printing after the hook name, or "" if the position is unknown.
func AtHook(p *hookorder.Position) string {
	if p == nil {
		return ""
	}
	return ": " + p.String()
}

// PrintBeside prints the foreign programs at the hooks of an object.
func PrintBeside(w io.Writer, object string, at ...hookorder.Position) {
	for _, p := range at {
		if p.Of > 1 {
			fmt.Fprintf(w, "%s: %s: %s\n", object, p.Hook, p)
		}
	}
}
