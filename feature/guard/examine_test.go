// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"strings"
	"testing"
)

// A guard at the sockets of a non-local address has no effect.
func TestExamineNotLocal(t *testing.T) {
	w := newWorld(t)
	w.apply(guarded(t, "far", Options{Limit: 20}, "udp 192.0.2.77:5300", "udp 127.0.0.1:5300"), guarded(t, "near", Options{Limit: 20}, "udp :5301"))
	found, err := Feature{}.Examine(t.Context(), w.root)
	if err != nil || len(found) != 1 || found[0].Object != "far" || !strings.Contains(found[0].Text, "its listen address 192.0.2.77/32 is not local") {
		t.Errorf("%+v, %v", found, err)
	}
}
