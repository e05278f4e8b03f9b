// SPDX-License-Identifier: Apache-2.0

package links

import "testing"

func TestReasons(t *testing.T) {
	for w, want := range map[State]Reason{{}: 0, {1}: Probe, {0, 7}: Carrier, {1, 0, 255}: Probe | Drain} {
		if got := w.Reasons(); got != want {
			t.Errorf("%v: %b, want %b", w, got, want)
		}
	}
	if Slot(5) != 5 || Slot(4096+5) != 5 {
		t.Error("slots are not the index modulo their number")
	}
}
