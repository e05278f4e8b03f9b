// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/filter/expr"
)

// The table covers every field, every operator and every kind of slice. It omits only lists and
// rates, because Wireshark has none.
func TestTable(t *testing.T) {
	seen := map[string]int{}
	for _, p := range slices.Concat(pairs...) {
		expr.Walk(expr.MustParse(p.weir).Root, func(n expr.Node) {
			kind := fmt.Sprintf("%T", n)
			if c, ok := n.(*expr.Compare); ok {
				kind += c.Op.String()
			}
			seen[kind]++
			for _, x := range expr.Operands(n) {
				seen[x.Field.Name]++
				seen[fmt.Sprint("part ", x.Part)]++
			}
		})
	}
	want := []string{"*expr.And", "*expr.Or", "*expr.Xor", "*expr.Not", "*expr.Present", "*expr.In", "*expr.Test", "*expr.Contains", "*expr.Matches"}
	for op := expr.Eq; op <= expr.Ge; op++ {
		want = append(want, "*expr.Compare"+op.String())
	}
	for part := expr.Whole; part <= expr.Length; part++ {
		want = append(want, fmt.Sprint("part ", part))
	}
	for _, f := range expr.Fields() {
		if f.ID != expr.TransportUnreadable { // not in Wireshark
			want = append(want, f.Name)
		}
	}
	for _, w := range want {
		if seen[w] == 0 {
			t.Errorf("no pair tests %s", w)
		}
	}
	if n := len(slices.Concat(pairs...)); n < 200 {
		t.Errorf("got %d pairs, want at least 200", n)
	}
}
