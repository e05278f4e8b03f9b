// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Limits for a package that one person can know: handwritten Go files without tests.
const (
	maxFiles = 30
	maxLines = 5000
)

// large are the packages over the limits: none. The list may only shrink.
var large []string

// packageSize is the handwritten size of a package.
type packageSize struct{ files, lines int }

func (s packageSize) large() bool { return s.files > maxFiles || s.lines > maxLines }

func TestPackageSize(t *testing.T) {
	sizes, err := packageSizes(repository(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(sizes) < 50 {
		t.Fatalf("only %d packages found", len(sizes))
	}
	for _, problem := range sizeProblems(sizes, large) {
		t.Error(problem)
	}
}

// TestSizeProblems checks sizeProblems with a few sizes.
func TestSizeProblems(t *testing.T) {
	sizes := map[string]packageSize{"a": {30, 5000}, "b": {31, 100}, "c": {1, 5001}, "d": {2, 20}}
	got := sizeProblems(sizes, []string{"c", "d", "gone"})
	want := []string{"b has 31 files", "d is within the limits", "gone is no package"}
	if len(got) != len(want) {
		t.Fatalf("got %q", got)
	}
	for i := range want {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("got %q, want %q", got[i], want[i])
		}
	}
}

// sizeProblems names unlisted packages over the limits, and packages listed without reason.
func sizeProblems(sizes map[string]packageSize, listed []string) []string {
	var out []string
	for _, dir := range slices.Sorted(maps.Keys(sizes)) {
		if s := sizes[dir]; s.large() && !slices.Contains(listed, dir) {
			out = append(out, fmt.Sprintf("%s has %d files and %d lines, the most is %d and %d: split it", dir, s.files, s.lines, maxFiles, maxLines))
		}
	}
	for _, dir := range listed {
		s, ok := sizes[dir]
		switch {
		case !ok:
			out = append(out, dir+" is no package: take it off the list of large ones")
		case !s.large():
			out = append(out, dir+" is within the limits: take it off the list of large ones")
		}
	}
	return out
}

// packageSizes counts by folder. Tests and generated files do not count.
func packageSizes(root string) (map[string]packageSize, error) {
	sizes := map[string]packageSize{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && path != root && (name == "testdata" || name[0] == '.' || name[0] == '_') {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || bytes.HasPrefix(text, []byte("// Code generated ")) {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		s := sizes[dir]
		sizes[dir] = packageSize{s.files + 1, s.lines + bytes.Count(text, []byte("\n"))}
		return err
	})
	return sizes, err
}
