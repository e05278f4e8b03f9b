// SPDX-License-Identifier: Apache-2.0

package confined

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOpen(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "a", "b")
	outside := t.TempDir()
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "file"), nil, 0o600),
		os.Symlink("file", filepath.Join(dir, "link")), os.Symlink(outside, filepath.Join(base, "out")), os.Symlink("b", filepath.Join(base, "a", "in"))); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir: "", filepath.Join(dir, "file"): "", base: "",
		filepath.Join(dir, "link"):             "link is a symbolic link",
		filepath.Join(base, "out", "x"):        "out is a symbolic link",
		filepath.Join(base, "a", "in", "file"): "in is a symbolic link",
		filepath.Join(dir, "none"):             "no such file",
		filepath.Join(dir, "file", "x"):        "not a directory",
		outside:                                "not below",
		filepath.Join(base, "..", "elsewhere"): "not below",
	} {
		f, err := Open(base, path)
		if want == "" && err == nil {
			named, serr := os.Stat(Name(f))
			direct, derr := os.Stat(path)
			if serr != nil || derr != nil || !os.SameFile(named, direct) {
				t.Errorf("%s: another file, %v, %v", path, serr, derr)
			}
			f.Close()
		} else if want == "" || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if _, err := Open(base, filepath.Join(base, "gone")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
