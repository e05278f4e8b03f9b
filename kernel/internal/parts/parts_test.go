// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"reflect"
	"testing"
)

func TestParts(t *testing.T) {
	p := Of("host/filter/a", []string{"counts", "names", "base"}, []string{"names"})
	got, err := Parse(p.Marshal())
	if err != nil || !reflect.DeepEqual(got, p) {
		t.Errorf("%+v, %v, want %+v", got, err, p)
	}
	if p.Fits("host/filter/a") != nil || p.Fits("host/guard/a") == nil {
		t.Error("it fits another instance, or not its own")
	}
	if name, lacks := p.Lacks([]string{"counts", "more"}); !lacks || name != "base" {
		t.Errorf("lacks %q, %v", name, lacks)
	}
	if _, lacks := p.Lacks([]string{"base", "counts", "more"}); lacks {
		t.Error("nothing is missing")
	}
	if !p.Names("names") || p.Names("other") {
		t.Error("does not name its maps alone")
	}
	if !p.Needs("base") || p.Needs("names") || !(Parts{}).Needs("names") {
		t.Error("needs an optional map, or not another")
	}
	if old, err := Parse(nil); err != nil || old.Fits("any/thing/x") != nil || old.Marshal() != nil {
		t.Errorf("of an earlier weir: %+v, %v", old, err)
	}
	for _, wrong := range []string{"x", "{}", `{"instance": 7}`, `{"maps": ["a"]}`} {
		if _, err := Parse([]byte(wrong)); err == nil {
			t.Errorf("%s is taken", wrong)
		}
	}
}
