// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Only this package and lab.Terminal write escape sequences, and lab/cast reads them. Their tests check NO_COLOR. So a
// new coloured output needs one of them, or a line here with a test.
func TestSourcesOfSequences(t *testing.T) {
	known := map[string]bool{"internal/terminal/terminal.go": false, "lab/terminal.go": false, "lab/cast/screen.go": false}
	sequence := regexp.MustCompile(`\\x1b|\\033|\\e\[|0x1b\b|\b27\b.*\[`)
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(root, path)
		if err != nil || !sequence.Match(text) {
			return err
		}
		if _, ok := known[name]; !ok {
			t.Errorf("%s writes an escape sequence: %s", name, sequence.Find(text))
		}
		known[name] = true
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, found := range known {
		if !found {
			t.Errorf("%s has no sequence: remove it from the list", name)
		}
	}
}
