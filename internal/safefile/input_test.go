// SPDX-License-Identifier: Apache-2.0

package safefile_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/safefile"
)

func TestInput(t *testing.T) {
	file := filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(file, []byte("services: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	name, data, err := safefile.Input(file, 1<<20)
	if err != nil || name != file || string(data) != "services: {}\n" {
		t.Errorf("%s, %q, %v", name, data, err)
	}
	if _, _, err := safefile.Input("/dev/zero", 1<<20); err == nil || !strings.Contains(err.Error(), "more than 1 MiB") {
		t.Errorf("a file without an end: %v", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdin := os.Stdin
	os.Stdin = r
	defer func() { os.Stdin = stdin }()
	if _, err := w.WriteString("from a pipe"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	name, data, err = safefile.Input("-", 1<<20)
	if err != nil || name != "standard input" || string(data) != "from a pipe" {
		t.Errorf("%s, %q, %v", name, data, err)
	}
}
