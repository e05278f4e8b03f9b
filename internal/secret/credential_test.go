// SPDX-License-Identifier: Apache-2.0

package secret

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLocate(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(directory, dir)
	if err := os.WriteFile(filepath.Join(dir, "weir-cert"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"/etc/weir/lb.pem": "/etc/weir/lb.pem", "credential:weir-cert": filepath.Join(dir, "weir-cert")} {
		if got, err := Locate(name); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"credential:", "credential:..", "credential:../weir-cert", "credential:/etc/passwd", "credential:a:b"} {
		if got, err := Locate(name); err == nil || got != "" {
			t.Errorf("%s: %q, want an error", name, got)
		}
	}
	_, err := Locate("credential:weir-key")
	if err == nil || errors.Is(err, ErrNoCredentials) || !strings.Contains(err.Error(), "add LoadCredential=weir-key:/") {
		t.Errorf("a missing credential: %v", err)
	}
	for _, unset := range []string{"", "relative"} {
		t.Setenv(directory, unset)
		if _, err := Locate("credential:weir-cert"); !errors.Is(err, ErrNoCredentials) || !strings.Contains(err.Error(), "add LoadCredential=weir-cert:/") {
			t.Errorf("%s=%s: %v", directory, unset, err)
		}
	}
}
