// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"encoding"
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/suggest"
	"go.yaml.in/yaml/v3"
)

var (
	durationType = reflect.TypeFor[time.Duration]()
	posType      = reflect.TypeFor[Pos]()
	coreTags     = []string{"!!str", "!!int", "!!float", "!!bool", "!!null", "!!map", "!!seq", "!!timestamp", "!!merge", "!"}
)

// value decodes one node into v and records mistakes. v is settable.
func (d *Decoder) value(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		d.alias(n, v)
		return
	}
	if n.Style&yaml.TaggedStyle != 0 && !slices.Contains(coreTags, n.ShortTag()) {
		d.failf(n, "", "the tag %s is not supported: remove it, or quote a text that begins with !", n.ShortTag())
		return
	}
	for v.Kind() == reflect.Pointer {
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		v = v.Elem()
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		d.failf(n, "", "want %s, got nothing; %s", wanted(v), remedy(v))
		return
	}
	if c, ok := v.Addr().Interface().(Node); ok {
		d.record(c.UnmarshalNode(n, d), n)
		return
	}
	if t, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		d.text(n, t, v)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.structure(n, v)
	case reflect.Map:
		d.mapping(n, v)
	case reflect.Slice:
		d.list(n, v)
	default:
		d.scalar(n, v)
	}
}

func (d *Decoder) alias(n *yaml.Node, v reflect.Value) {
	if d.open[n.Alias] {
		d.failf(n, "", "the anchor &%s contains itself", n.Value)
		return
	}
	if d.aliased > maxAliased {
		return // already reported
	}
	if d.aliased += d.size(n.Alias); d.aliased > maxAliased {
		d.failf(n, "", "aliases expand to more than %d values; use fewer", maxAliased)
		return
	}
	if d.open == nil {
		d.open = make(map[*yaml.Node]bool)
	}
	d.open[n.Alias] = true
	d.value(n.Alias, v)
	delete(d.open, n.Alias)
}

// size returns the number of nodes from n down, including keys, because unknown ones cost as much
// as others. An alias counts once.
func (d *Decoder) size(n *yaml.Node) int {
	if len(n.Content) == 0 {
		return 1
	}
	if s, ok := d.sizes[n]; ok {
		return s
	}
	s := 1
	for _, below := range n.Content {
		s += d.size(below)
	}
	if d.sizes == nil {
		d.sizes = make(map[*yaml.Node]int)
	}
	d.sizes[n] = s
	return s
}

func (d *Decoder) in(step string, f func()) {
	d.path = append(d.path, step)
	f()
	d.path = d.path[:len(d.path)-1]
}

// plainKey matches keys without need for quotes in a path.
var plainKey = regexp.MustCompile(`^[^][".\s\x00-\x1f\x7f]+$`)

func (d *Decoder) inKey(key string, f func()) {
	if !plainKey.MatchString(key) {
		key = strconv.Quote(shorten(key))
	}
	d.in(key, f)
}

func (d *Decoder) structure(n *yaml.Node, v reflect.Value) {
	fs := newFields(v.Type())
	if len(fs.positions) > 0 {
		at := d.Pos(n)
		at.keys = d.keys(n, 2)
		for _, p := range fs.positions {
			v.FieldByIndex(p).Set(reflect.ValueOf(at))
		}
	}
	if n.Kind != yaml.MappingNode {
		d.failf(n, "", "want %s, got %s", wanted(v), got(n))
		return
	}
	more, extended := v.Addr().Interface().(extended)
	if extended {
		fs.names = append(fs.names, more.Keys()...)
		slices.Sort(fs.names)
	}
	d.pairs(n, func(key, value *yaml.Node) {
		index, ok := fs.index[key.Value]
		if !ok && extended && slices.Contains(more.Keys(), key.Value) {
			d.inKey(key.Value, func() { d.value(value, reflect.ValueOf(more.Section(key.Value)).Elem()) })
			return
		}
		if !ok {
			d.unknown(key, fs)
			return
		}
		d.inKey(key.Value, func() {
			before := len(d.errs)
			d.value(value, v.FieldByIndex(index))
			if fs.defaults[key.Value] && len(d.errs) == before && v.FieldByIndex(index).IsZero() {
				d.failf(value, "", "%s: want more than 0; leave the key out for the default", value.Value)
			}
		})
		field, kind := v.FieldByIndex(index), fs.files[key.Value]
		if kind == "file" || kind == "credential" && !strings.HasPrefix(field.String(), "credential:") {
			d.absolute(field)
		}
	})
}

// absolute makes the file names in a text or map absolute, relative to the configuration's
// directory. The process reading the files later has another working directory.
func (d *Decoder) absolute(v reflect.Value) {
	if v.Kind() == reflect.Map {
		for _, k := range v.MapKeys() {
			elem := reflect.New(v.Type().Elem()).Elem()
			elem.Set(v.MapIndex(k))
			d.absolute(elem)
			v.SetMapIndex(k, elem)
		}
		return
	}
	if name := v.String(); name != "" && name[0] != '@' {
		if !filepath.IsAbs(name) {
			name = filepath.Join(filepath.Dir(d.file), name)
		}
		if abs, err := filepath.Abs(name); err == nil {
			v.SetString(abs)
		}
	}
}

func (d *Decoder) unknown(key *yaml.Node, fs *fields) {
	if now := fs.former[key.Value]; now != "" {
		d.failf(key, "", "unknown key %q; it is %q now", key.Value, now)
		return
	}
	if near := suggest.Nearest(key.Value, fs.names); near != "" {
		d.failf(key, near, "unknown key %q", key.Value)
		return
	}
	if len(fs.names) == 0 {
		d.failf(key, "", "unknown key %q; no keys are known here", key.Value)
		return
	}
	d.failf(key, "", "unknown key %q; known here: %s", key.Value, strings.Join(fs.names, ", "))
}

// pairs visits the keys of a mapping and their values. It reports and skips repeated keys.
func (d *Decoder) pairs(n *yaml.Node, visit func(key, value *yaml.Node)) {
	first := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		place := key
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		tag := key.ShortTag()
		switch line, seen := first[key.Value]; {
		case key.Kind != yaml.ScalarNode || tag == "!!null":
			d.failf(place, "", "want a name as key, got %s", got(key))
		case tag == "!!merge":
			d.failf(place, "", "merge keys (<<) are not supported; write the keys out")
		case seen:
			d.failf(place, "", "duplicate key %q; first in line %d", key.Value, line)
		default:
			first[key.Value] = place.Line
			visit(key, value)
		}
	}
}

func (d *Decoder) mapping(n *yaml.Node, v reflect.Value) {
	t := v.Type()
	if t.Key().Kind() != reflect.String {
		panic(fmt.Sprintf("strictyaml: %s: want a map with string keys", t))
	}
	if n.Kind != yaml.MappingNode {
		d.failf(n, "", "want %s, got %s", wanted(v), got(n))
		return
	}
	if v.IsNil() {
		v.Set(reflect.MakeMap(t))
	}
	d.pairs(n, func(key, value *yaml.Node) {
		d.inKey(key.Value, func() {
			elem := reflect.New(t.Elem()).Elem()
			d.value(value, elem)
			v.SetMapIndex(reflect.ValueOf(key.Value).Convert(t.Key()), elem)
		})
	})
}

func (d *Decoder) list(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		suggestion := ""
		if n.Kind == yaml.ScalarNode {
			suggestion = "[" + n.Value + "]"
		}
		d.failf(n, suggestion, "want %s, got %s", wanted(v), got(n))
		return
	}
	s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, c := range n.Content {
		d.in(fmt.Sprintf("[%d]", i), func() { d.value(c, s.Index(i)) })
	}
	v.Set(s)
}

func (d *Decoder) text(n *yaml.Node, t encoding.TextUnmarshaler, v reflect.Value) {
	// Empty text is rejected because several types, netip's among them, accept it as their zero
	// value. A configuration never means that.
	if n.Kind != yaml.ScalarNode || n.Value == "" {
		d.failf(n, "", "want %s, got %s", wanted(v), got(n))
		return
	}
	if err := t.UnmarshalText([]byte(n.Value)); err != nil {
		if v.Type().PkgPath() == "net/netip" { // its errors mention Go functions
			d.failf(n, suggestText(v, n.Value), "want %s, got %s", wanted(v), got(n))
			return
		}
		e := d.Errorf(n, suggestText(v, n.Value), "%w", err)
		d.record(e, n)
	}
}
