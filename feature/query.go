// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"net/url"
	"reflect"

	"github.com/weir-project/weir/kernel"
)

// StatusQuery is the query that every feature answers: its part of weir status.
const StatusQuery = "status"

// Query is a question about a feature, answered from the pins by the command line and by weir serve over its socket.
type Query struct {
	Name   string // the path is /v1/FEATURE/NAME
	Answer func(ctx context.Context, r *kernel.Root, args url.Values) (any, error)
}

// Queried is implemented by features with queries beside [StatusQuery].
type Queried interface {
	Queries() []Query
}

// Reporter is implemented by features whose part of weir status is more than their state.
type Reporter interface {
	// Report returns the part, to be encoded as a JSON object. faults are those of all features. With an error the part
	// holds what could be read.
	Report(ctx context.Context, r *kernel.Root, faults []kernel.Fault) (any, error)
}

// Emptier is implemented by states that weir status leaves out where they show nothing.
type Emptier interface {
	Empty() bool
}

// Report returns the feature's part of weir status, empty or not.
func (d Declared) Report(ctx context.Context, r *kernel.Root, faults []kernel.Fault) (any, error) {
	if x, ok := d.Value.(Reporter); ok {
		return x.Report(ctx, r, faults)
	}
	return d.state(ctx, r)
}

// Blank reports whether weir status leaves a part out.
func Blank(part any) bool {
	if e, ok := part.(Emptier); ok {
		return e.Empty()
	}
	v := reflect.ValueOf(part)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// Queries are the feature's queries beside [StatusQuery].
func (d Declared) Queries() []Query {
	if q, ok := d.Value.(Queried); ok {
		return q.Queries()
	}
	return nil
}
