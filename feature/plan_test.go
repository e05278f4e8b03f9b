// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"testing"

	"github.com/weir-project/weir/kernel"
)

// The error of a failed plan tells the fate of the steps before it, because they were printed as done.
func TestFailedPlanTellsOfUndo(t *testing.T) {
	refused := errors.New("refused")
	step := func(object string, err error) Step {
		return Step{Verb: "create", Object: object, Do: func(context.Context, *kernel.WriteLock) (string, error) { return "", err }}
	}
	undo := func(context.Context, *kernel.WriteLock) error { return nil }
	for _, c := range []struct {
		plan Plan
		want string
	}{
		{Plan{Steps: []Step{step("a", nil), step("b", refused)}}, "create b: refused"},
		{Plan{Steps: []Step{step("a", refused)}}, "create a: refused"},
		{Plan{Steps: []Step{step("a", nil), step("b", refused)}}, "create b: refused; the earlier steps were undone: everything is as before"},
	} {
		if c.want != "create b: refused" {
			c.plan.Undo = append(c.plan.Undo, undo)
		}
		if err := c.plan.Apply(t.Context(), nil, nil); !errors.Is(err, refused) || err.Error() != c.want {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}
