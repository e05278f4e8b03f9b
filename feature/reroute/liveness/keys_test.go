// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// A plan, and so a dry run, reports unusable keys, and warns of addresses this router does not have.
func TestPlanReadsKeysAndAddresses(t *testing.T) {
	nstest.NeedRoot(t)
	ns, far := nstest.NewNetns(t), nstest.NewNetns(t)
	nstest.Cable(t, ns, "w0", far, "w0")
	s := valid()
	s.KeyFile = filepath.Join(t.TempDir(), "key")
	want := Config{Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.FD()), Sessions: []Session{s}}
	if _, err := Plan(t.Context(), State{}, want); err == nil || !strings.Contains(err.Error(), s.KeyFile) {
		t.Errorf("%v: want the key file that is missing", err)
	}
	if err := os.WriteFile(s.KeyFile, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	plan, err := Plan(t.Context(), State{}, want)
	if err != nil || !strings.Contains(strings.Join(plan.Warnings, "\n"), "source 2001:db8::1 is no address of this router") {
		t.Errorf("%q, %v: want a warning of the source", plan.Warnings, err)
	}
}
