// SPDX-License-Identifier: Apache-2.0

// Package strictyaml decodes YAML into Go structs strictly. An unknown or repeated key, a value of
// the wrong type or a missing value is an error. It names file, line and column, and suggests a
// similar word if there is one. All mistakes of a file are reported at once.
//
// Fields are named by `yaml:"name"` tags as in package yaml. Untagged ones have their name in lower
// case. Embedded structs, and fields tagged `yaml:",inline"`, share the mapping of their parent.
// Supported types are structs, maps with string keys, slices, pointers, bool, integers, floats,
// strings, [time.Duration] ("30s"), [encoding.TextUnmarshaler] and [Node]. A string accepts any
// scalar as written. Anchors and aliases work within a bound. Merge keys (<<), private tags and
// multiple documents are rejected.
//
// A value tagged `zero:"default"` must not be zero in a file. Zero in the struct then means another
// default.
//
// A string, or a map of strings, tagged `path:"file"` contains file names. Decode makes them
// absolute, relative to the directory of the decoded file. An abstract socket (@name) stays as it
// is. With the tag `path:"credential"`, the form credential:NAME stays too.
//
// A field tagged `former:"name"` previously had that key. The error for a file with the old key
// names the new one.
package strictyaml

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	// maxAliased bounds the values reached through aliases, so a short file cannot expand to
	// billions of them.
	maxAliased = 100_000
	// maxErrors bounds the report. A file of another kind has a mistake in every line.
	maxErrors = 200
)

// Node is implemented by values that read their YAML themselves. The node is never an alias or
// null. Create errors with d.Errorf, and join several of them with [errors.Join]. Any other error
// is reported at the node's position.
type Node interface {
	UnmarshalNode(n *yaml.Node, d *Decoder) error
}

// extended is implemented, with a pointer receiver, by structs with keys beside their fields.
type extended interface {
	// Keys lists these keys.
	Keys() []string
	// Section returns a pointer to decode the value of one of these keys into. It is called once
	// for each key present.
	Section(key string) any
}

// Decode decodes one document into the value pointed to by into. Fields without a key in the file
// keep their value. The error is an [*Error], or several of them joined in the order of the file.
// into is then incomplete.
func Decode(file string, data []byte, into any) error {
	v := reflect.ValueOf(into)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		panic(fmt.Sprintf("strictyaml: Decode into %T, want a pointer", into))
	}
	d := &Decoder{file: file}
	root, err := d.parse(data)
	if err != nil {
		return err
	}
	d.value(root, v.Elem())
	return d.report()
}

// Decoder is the state of decoding one file.
type Decoder struct {
	file    string
	path    []string
	errs    []*Error
	aliased int                // nodes reached through aliases so far
	sizes   map[*yaml.Node]int // of nodes with children
	listed  map[aliasedKeys]*[]key
	open    map[*yaml.Node]bool // anchors being expanded
}

// Errorf returns an error at the position of n, with the path of the current value. suggestion may
// be "". Return the error: Errorf does not record it.
func (d *Decoder) Errorf(n *yaml.Node, suggestion, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{
		File: d.file, Line: max(n.Line, 1), Column: max(n.Column, 1), Path: d.where(),
		Msg: err.Error(), Suggestion: suggestion, Err: errors.Unwrap(err),
	}
}

// Decode decodes n into the value pointed to by into. Implementations of [Node] use it for parts
// under the usual rules.
func (d *Decoder) Decode(n *yaml.Node, into any) error {
	before := len(d.errs)
	d.value(n, reflect.ValueOf(into).Elem())
	var errs []error
	for _, e := range d.errs[before:] {
		errs = append(errs, e)
	}
	d.errs = d.errs[:before]
	return errors.Join(errs...)
}

// Pos returns the position of n. A block mapping has the position of its first key, even with an
// anchor on the line above.
func (d *Decoder) Pos(n *yaml.Node) Pos {
	if n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle == 0 && len(n.Content) > 0 {
		n = n.Content[0]
	}
	return Pos{File: d.file, Line: max(n.Line, 1), Column: max(n.Column, 1)}
}

// where joins the path: a.b[2].c. It quotes ambiguous keys.
func (d *Decoder) where() string {
	var b strings.Builder
	for i, p := range d.path {
		if i > 0 && !strings.HasPrefix(p, "[") {
			b.WriteByte('.')
		}
		b.WriteString(p)
	}
	return b.String()
}

func (d *Decoder) failf(n *yaml.Node, suggestion, format string, args ...any) {
	d.record(d.Errorf(n, suggestion, format, args...), n)
}

// record stores the errors in err. One without a position gets the position of n.
func (d *Decoder) record(err error, n *yaml.Node) {
	walk(err, func(e error) {
		if len(d.errs) > maxErrors {
			return
		}
		placed, ok := errors.AsType[*Error](e)
		if !ok || placed.Line == 0 {
			placed, _ = errors.AsType[*Error](d.Errorf(n, "", "%w", e))
			placed.Err = e
		}
		d.errs = append(d.errs, placed)
	})
}

func (d *Decoder) report() error {
	slices.SortStableFunc(d.errs, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	if len(d.errs) > maxErrors {
		last := d.errs[maxErrors]
		d.errs[maxErrors] = &Error{File: d.file, Line: last.Line, Column: last.Column,
			Msg: fmt.Sprintf("more than %d errors; fix these first", maxErrors)}
	}
	if len(d.errs) == 1 {
		return d.errs[0]
	}
	var errs []error
	for _, e := range d.errs {
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}
