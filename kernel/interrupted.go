// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
)

// Interrupted is the error of a change that INT or TERM ended. It wraps the context's error.
type Interrupted struct {
	Became string // what became of the change: "nothing was changed", "half done: " and the remedy
	Err    error
}

func (e *Interrupted) Error() string {
	if strings.HasPrefix(e.Became, "half done") {
		return e.Became
	}
	return "interrupted: " + e.Became
}

// Unwrap returns the context's error.
func (e *Interrupted) Unwrap() error { return e.Err }

// Stopped returns err as an [Interrupted] if it comes from the end of ctx and does not say yet what became of the change.
func Stopped(ctx context.Context, err error, became string) error {
	if err == nil || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
		return err
	}
	if _, told := errors.AsType[*Interrupted](err); told {
		return err
	}
	return &Interrupted{became, err}
}

// writing counts the locks that this process has, and those that it ever had.
var writing struct{ now, ever atomic.Int64 }

// Writing says whether this process has the lock of a root, and whether it ever had one: who has to end knows by it whether a
// change may be half done.
func Writing() (now, ever bool) { return writing.now.Load() > 0, writing.ever.Load() > 0 }
