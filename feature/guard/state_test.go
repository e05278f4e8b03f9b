// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"reflect"
	"testing"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
)

// TestLayout compares the layout of a guard's state in Go and in the programs, field by field.
func TestLayout(t *testing.T) {
	sameLayout(t, "state", reflect.TypeFor[guardstate.Layout](), reflect.TypeFor[bpf.GuardGuardState]())
	sameLayout(t, "limits", reflect.TypeFor[guardstate.LimitsLayout](), reflect.TypeFor[bpf.GuardGuardLimits]())
	sameLayout(t, "top entry", reflect.TypeFor[guardstate.TopEntry](), reflect.TypeFor[bpf.GuardGuardTopEntry]())
}

func sameLayout(t *testing.T, at string, a, b reflect.Type) {
	t.Helper()
	if a.Kind() != b.Kind() || a.Size() != b.Size() {
		t.Errorf("%s: %s of %d bytes, but %s of %d in the programs", at, a.Kind(), a.Size(), b.Kind(), b.Size())
		return
	}
	switch a.Kind() {
	case reflect.Array:
		if a.Len() != b.Len() {
			t.Errorf("%s: %d elements, but %d in the programs", at, a.Len(), b.Len())
		}
		sameLayout(t, at+"[]", a.Elem(), b.Elem())
	case reflect.Struct:
		for i := range a.NumField() {
			f := a.Field(i)
			g, ok := b.FieldByName(f.Name)
			if !ok || f.Offset != g.Offset {
				t.Errorf("%s.%s: offset %d, but %d in the programs", at, f.Name, f.Offset, g.Offset)
				continue
			}
			sameLayout(t, at+"."+f.Name, f.Type, g.Type)
		}
	}
}
