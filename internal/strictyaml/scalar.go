// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"encoding"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// errWanted reports text of another form than wanted.
var errWanted = errors.New("not what was wanted")

// scalar decodes into the basic kinds.
func (d *Decoder) scalar(n *yaml.Node, v reflect.Value) {
	err := errWanted
	if n.Kind == yaml.ScalarNode {
		quoted := n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0
		isText := v.Kind() == reflect.String || v.Type() == durationType
		err = setScalar(v, n.Value)
		if err == nil && quoted && !isText {
			d.failf(n, "", "want %s, got the text %q; remove the quotes", wanted(v), n.Value)
			return
		}
	}
	switch {
	case err == nil:
	case errors.Is(err, strconv.ErrRange):
		d.failf(n, "", "want %s%s, got %s", wanted(v), limits(v), n.Value)
	default:
		d.failf(n, suggestScalar(v, n), "want %s, got %s", wanted(v), got(n))
	}
}

// Supported numbers. A mere leading zero is not octal: 010 means 8 in YAML 1.1, 10 in YAML 1.2, and
// is a misprint for most people.
var (
	wholeNumber = regexp.MustCompile(`^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$`)
	realNumber  = regexp.MustCompile(`^[-+]?([0-9][0-9_]*)?\.?[0-9]*([eE][-+]?[0-9]+)?$`)
)

func setScalar(v reflect.Value, s string) error {
	if v.Type() == durationType {
		t, err := time.ParseDuration(s)
		if err != nil || s == "0" {
			return errWanted // also 0: the unit makes clear that it is a duration
		}
		v.SetInt(int64(t))
		return nil
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(s)
	case reflect.Bool:
		if s != "true" && s != "false" {
			return errWanted
		}
		v.SetBool(s == "true")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if !wholeNumber.MatchString(s) {
			return errWanted
		}
		i, err := strconv.ParseInt(strings.TrimPrefix(s, "+"), 0, v.Type().Bits())
		if err != nil {
			return err
		}
		v.SetInt(i)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if !wholeNumber.MatchString(s) {
			return errWanted
		}
		if strings.HasPrefix(s, "-") {
			return strconv.ErrRange
		}
		u, err := strconv.ParseUint(strings.TrimPrefix(s, "+"), 0, v.Type().Bits())
		if err != nil {
			return err
		}
		v.SetUint(u)
	case reflect.Float32, reflect.Float64:
		if !realNumber.MatchString(s) {
			return errWanted
		}
		f, err := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), v.Type().Bits())
		if err != nil {
			return err
		}
		v.SetFloat(f)
	default:
		panic(fmt.Sprintf("strictyaml: cannot decode into %s", v.Type()))
	}
	return nil
}

// wanted describes the values of v for a user.
func wanted(v reflect.Value) string {
	if v.Type() == durationType {
		return "a duration like 30s or 5m"
	}
	if _, ok := v.Addr().Interface().(Node); ok {
		return "a value"
	}
	if _, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return textWanted(v.Type())
	}
	switch v.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a mapping (key: value)"
	}
	return "a value"
}

// remedy describes the replacement for an empty value.
func remedy(v reflect.Value) string {
	switch {
	case wanted(v) == "a list":
		return "write [] for an empty one, or remove the key"
	case wanted(v) == "a mapping (key: value)":
		return "write {} for an empty one, or remove the key"
	}
	return "give one, or remove the key"
}

// got describes the value in the file.
func got(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!null":
			return "nothing"
		case "!!int", "!!float", "!!bool":
			return n.Value
		}
		return strconv.Quote(shorten(n.Value))
	}
	return "something else"
}

func shorten(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "…"
	}
	return s
}

// limits returns the range of an integer type.
func limits(v reflect.Value) string {
	bits := v.Type().Bits()
	switch v.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return fmt.Sprintf(" from %d to %d", -(int64(math.MaxInt64)>>(64-bits))-1, int64(math.MaxInt64)>>(64-bits))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return fmt.Sprintf(" from 0 to %d", uint64(math.MaxUint64)>>(64-bits))
	}
	return " within its range"
}
