// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"

	"github.com/weir-project/weir/feature/filter/expr"
)

var errTodo = errors.New("not there yet")

func (g *gen) contains(n *expr.Contains, t, f label) { g.fail(errTodo) }
func (g *gen) matches(n *expr.Matches, t, f label)   { g.fail(errTodo) }
func (g *gen) rate(n *expr.Rate, t, f label)         { g.fail(errTodo) }
