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

// host knows features by package feature alone. Only its list names them.
func TestHostNamesNoFeature(t *testing.T) {
	const dir, list, features = "../../host", "features.go", "github.com/weir-project/weir/feature/"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	named := 0
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
			if !strings.HasPrefix(path, features) {
				continue
			}
			if named++; e.Name() != list {
				t.Errorf("host/%s imports %s: ask it through an interface of package feature; only %s names features", e.Name(), path, list)
			}
		}
	}
	if named == 0 {
		t.Errorf("host/%s names no feature: is this test looking in the right place?", list)
	}
}
