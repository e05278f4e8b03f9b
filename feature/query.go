// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"net/url"
	"reflect"

	"github.com/weir-project/weir/kernel"
)

// StatusQuery is the query answered by every feature: its part of weir status.
const StatusQuery = "status"

// Query is a question about a feature. The command line and weir serve's socket answer it from the pins.
type Query struct {
	Name   string // the path is /v1/FEATURE/NAME
	Answer func(ctx context.Context, r *kernel.Root, args url.Values) (any, error)
}

// Queried is implemented by features with queries beside [StatusQuery].
type Queried interface {
	Queries() []Query
}

// Reporter is implemented by features whose part of weir status differs from their state.
type Reporter interface {
	// Report returns the part, for encoding as a JSON object. faults are the faults of all features. On an error the
	// part holds the readable data.
	Report(ctx context.Context, r *kernel.Root, faults []kernel.Fault) (any, error)
}

// Emptier is implemented by states omitted from weir status while empty.
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

// Blank reports whether weir status omits a part.
func Blank(part any) bool {
	if e, ok := part.(Emptier); ok {
		return e.Empty()
	}
	v := reflect.ValueOf(part)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// Queries returns the feature's queries beside [StatusQuery].
func (d Declared) Queries() []Query {
	if q, ok := d.Value.(Queried); ok {
		return q.Queries()
	}
	return nil
}
