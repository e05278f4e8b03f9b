// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// TestCertificateRecipe checks that agents accept the recipe's certificates, including a later one,
// and reject another CA's.
func TestCertificateRecipe(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	recipe := func(dir string, names ...string) {
		t.Helper()
		c := exec.Command("sh", append([]string{"../../../examples/handoff/certificates", dir}, names...)...)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s (want openssl)", err, out)
		}
	}
	load := func(dir, name string) *peer.Identity {
		t.Helper()
		c, err := peer.Files{Certificate: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key"), CA: filepath.Join(dir, "ca.pem")}.Load()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	recipe(dir, "lb")
	lb := load(dir, "lb")
	recipe(dir, "lb", "host-a")
	recipe(other, "lb", "host-a")
	if _, _, errA, errB := pair(t, load(dir, "host-a"), lb); errA != nil || errB != nil {
		t.Error(errA, errB)
	}
	if _, _, errA, errB := pair(t, load(other, "host-a"), lb); errA == nil && errB == nil {
		t.Error("a certificate of another CA is taken")
	}
}
