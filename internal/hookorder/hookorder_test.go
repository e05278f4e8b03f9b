// SPDX-License-Identifier: Apache-2.0

package hookorder

import "testing"

// TestOrderText checks that an order survives as text, and invalid text is rejected.
func TestOrderText(t *testing.T) {
	for _, o := range []Order{{}, {Where: First}, {Where: Last}, {Before, "cil_from_netdev"}, {After, "tc_flow"}} {
		text, err := o.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var again Order
		if err := again.UnmarshalText(text); err != nil || again != o {
			t.Errorf("%q: %+v, %v", text, again, err)
		}
	}
	for _, text := range []string{"middle", "before", "after", "first one", "last one"} {
		if err := new(Order).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// TestCalled checks that a program matches its whole name and the 15 bytes kept by the kernel.
func TestCalled(t *testing.T) {
	for _, c := range []struct {
		program, name string
		want          bool
	}{
		{"cil_from_netdev", "cil_from_netdev", true},
		{"cil_from_netdev", "cil_from_netde", false},
		{"netobserv_ingress_flow_parse", "netobserv_ingress_flow_parse", true},
		{"netobserv_ingress_flow_parse", "netobserv_ingre", true},
		{"netobserv_ingre", "netobserv_ingress_flow_parse", true}, // without BTF the kernel has only this
		{"netobserv_ingress_flow_parse", "netobserv_ingress_other", false},
		{"short", "shorter", false},
	} {
		if got := (Program{Name: c.program}).called(c.name); got != c.want {
			t.Errorf("%s called %s: %v", c.program, c.name, got)
		}
	}
}

func TestKept(t *testing.T) {
	one, two := Program{1, "one"}, Program{2, "two"}
	middle := Position{Number: 2, Of: 3, Before: []Program{one}, After: []Program{two}}
	for _, c := range []struct {
		order Order
		want  bool
	}{
		{Order{}, true}, {Order{Where: First}, false}, {Order{Where: Last}, false},
		{Order{After, "one"}, true}, {Order{Before, "one"}, false},
		{Order{Before, "two"}, true}, {Order{After, "two"}, false},
		{Order{After, "nobody"}, true}, {Order{Before, "nobody"}, true},
	} {
		if got := c.order.Kept(middle); got != c.want {
			t.Errorf("%s: kept %v", c.order, got)
		}
	}
	if alone := (Position{Number: 1, Of: 1}); !(Order{Where: First}).Kept(alone) || !(Order{Where: Last}).Kept(alone) {
		t.Error("alone is neither first nor last")
	}
	for _, c := range []struct {
		p    Position
		want string
	}{
		{middle, "2 of 3, after one"},
		{Position{Number: 1, Of: 2, After: []Program{two}}, "1 of 2, before two"},
		{Position{Number: 2, Of: 2, Before: []Program{{ID: 7}}}, "2 of 2, after program 7"},
		{Position{Number: 1, Of: 1}, "the only program"},
	} {
		if got := c.p.String(); got != c.want {
			t.Errorf("%+v: %s; want %s", c.p, got, c.want)
		}
	}
}
