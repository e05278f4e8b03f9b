// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
)

func TestWord(t *testing.T) {
	for _, f := range []move.Flow{{}, {Owner: 1}, {Owner: spec.MaxBackends, To: spec.MaxBackends, Predecessor: spec.MaxBackends, Buffering: true, Epoch: 1<<32 - 1}, {Owner: 3, To: 4, Epoch: 8}} {
		for _, buffered := range []bool{false, true} {
			if got, b := Unword(Word(f, buffered)); got != f || b != buffered {
				t.Errorf("%+v, %v: %+v, %v", f, buffered, got, b)
			}
		}
	}
}
