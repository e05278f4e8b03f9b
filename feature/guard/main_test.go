// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"attach": runAttach, "apply": runApply})
	nstest.Main(m)
}

// need skips if the kernel lacks a need of all guards.
func need(t testing.TB, more ...kernel.Need) {
	t.Helper()
	nstest.NeedRoot(t)
	for _, n := range append(more, probe.CompareAndSwap) {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel", err)
		}
	}
}
