// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"github.com/weir-project/weir/feature/filter/expr"
)

var errTodo = errors.New("not there yet")

type List struct{}
type step struct {
	rule  int
	after bool
}
type plan struct {
	groups []int
	steps  []step
}

func newPlan(rules []Rule) *plan {
	p := &plan{}
	for i := range rules {
		p.steps = append(p.steps, step{rule: i})
	}
	return p
}
func (g *gen) groups()                               {}
func (g *gen) groupCounts()                          {}
func (g *gen) list(n *expr.In, t, f label)           { g.fail(errTodo) }
func (g *gen) contains(n *expr.Contains, t, f label) { g.fail(errTodo) }
func (g *gen) matches(n *expr.Matches, t, f label)   { g.fail(errTodo) }
func (g *gen) rate(n *expr.Rate, t, f label)         { g.fail(errTodo) }
