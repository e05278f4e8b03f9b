// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Error is one mistake in a file and its position.
type Error struct {
	File         string // as given to Decode
	Line, Column int    // from 1, Column in characters
	Path         string // of the value, like services.telemetry.members[1].slot; "" at the top
	Msg          string // the mistake and the expected value
	Suggestion   string // a similar word, "" if there is none
	Err          error  // the cause from another package
}

// Error prints as
//
//	weir.yaml:7:5: services.telemetry.steer: unknown key "slotz"; did you mean "slots"?
func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		fmt.Fprintf(&b, "%s:", e.File)
	}
	if e.Line > 0 {
		fmt.Fprintf(&b, "%d:%d:", e.Line, e.Column)
	}
	if b.Len() > 0 {
		b.WriteByte(' ')
	}
	if e.Path != "" {
		fmt.Fprintf(&b, "%s: ", e.Path)
	}
	b.WriteString(e.Msg)
	if e.Suggestion != "" {
		fmt.Fprintf(&b, "; did you mean %q?", e.Suggestion)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Pos is the position of a mapping. Decode fills struct fields of this type, so later checks can
// report the position, too. A value without a file has the zero Pos.
type Pos struct {
	File         string
	Line, Column int // from 1
	keys         *[]key
}

// Errorf returns an [*Error] at the position. %w is supported. A message beginning with a key of
// the mapping ("hold 3s: take less") gets the position of that key's value. This also works behind
// a path ("services.flows: by sources: want flow or source") and for a nested key ("front: address
// x: say where").
func (p Pos) Errorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	p = p.named(err.Error())
	return &Error{File: p.File, Line: p.Line, Column: p.Column, Msg: err.Error(), Err: errors.Unwrap(err)}
}

// joined is the type behind errors.Join. Errors of fmt.Errorf with several %w have the same methods
// but a text of their own, and stay whole.
var joined = reflect.TypeOf(errors.Join(errWanted))

// walk visits the members of joined errors, or err itself.
func walk(err error, visit func(error)) {
	if err == nil {
		return
	}
	if reflect.TypeOf(err) != joined {
		visit(err)
		return
	}
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		walk(e, visit)
	}
}
