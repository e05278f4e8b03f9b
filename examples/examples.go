// SPDX-License-Identifier: Apache-2.0

// Package examples embeds the example configurations of this folder.
package examples

import (
	"cmp"
	"embed"
	"io/fs"
	"path"
	"slices"
	"strings"
)

//go:embed *.yaml handoff/*.yaml
var files embed.FS

// Example is a configuration file of this folder.
type Example struct {
	Name  string // name of the file without its folder and suffix: "telemetry"
	About string // text of its first line
	Text  string
}

// All returns the examples, sorted by name.
func All() (out []Example) {
	for _, pattern := range []string{"*.yaml", "handoff/*.yaml"} {
		names, _ := fs.Glob(files, pattern) // the patterns are valid
		for _, name := range names {
			text, err := files.ReadFile(name)
			if err != nil {
				continue // embedded files are readable
			}
			first, _, _ := strings.Cut(string(text), "\n")
			out = append(out, Example{strings.TrimSuffix(path.Base(name), ".yaml"), strings.TrimPrefix(first, "# "), string(text)})
		}
	}
	slices.SortFunc(out, func(a, b Example) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
