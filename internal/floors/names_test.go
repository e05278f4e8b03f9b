// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// features is the import path of the features.
const features = "github.com/weir-project/weir/feature/"

// TestWhoNamesFeatures checks that host uses features only through package feature: only its list
// names them. In cmd/weir a file naming a feature begins with its name (handoff_lb.go), or is in a
// package of that name.
func TestWhoNamesFeatures(t *testing.T) {
	for dir, may := range map[string]func(file, feature string) bool{
		"host":             func(file, _ string) bool { return file == "features.go" },
		"cmd/weir":         func(file, feature string) bool { return file == feature+".go" || strings.HasPrefix(file, feature+"_") },
		"cmd/weir/filter":  func(_, feature string) bool { return feature == "filter" },
		"cmd/weir/guard":   func(_, feature string) bool { return feature == "guard" },
		"cmd/weir/reroute": func(_, feature string) bool { return feature == "reroute" },
	} {
		named := 0
		for file, imports := range importsOf(t, filepath.Join("../..", dir)) {
			for _, path := range imports {
				rest, ok := strings.CutPrefix(path, features)
				if !ok {
					continue
				}
				feature, _, _ := strings.Cut(rest, "/")
				if named++; !may(file, feature) {
					t.Errorf("%s/%s imports %s: ask it through package feature or host, or name the file after the feature", dir, file, path)
				}
			}
		}
		if named == 0 {
			t.Errorf("no file of %s names a feature: is this test looking in the right place?", dir)
		}
	}
}

// importsOf returns the imports of a folder's non-test files, by file.
func importsOf(t *testing.T, dir string) map[string][]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.Name()), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range f.Imports {
			path, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			out[e.Name()] = append(out[e.Name()], path)
		}
	}
	return out
}
