// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// fields maps the keys of a struct type.
type fields struct {
	names     []string          // sorted
	index     map[string][]int  // by key, for reflect.Value.FieldByIndex
	positions [][]int           // the fields of type Pos
	files     map[string]string // keys with file names as values, and their kind
	former    map[string]string // previous keys and their new names
	defaults  map[string]bool   // keys with a default other than zero
}

func newFields(t reflect.Type) *fields {
	fs := &fields{index: make(map[string][]int), files: make(map[string]string), former: make(map[string]string), defaults: make(map[string]bool)}
	fs.add(t, nil)
	slices.Sort(fs.names)
	return fs
}

func (fs *fields) add(t reflect.Type, at []int) {
	for i := range t.NumField() {
		f := t.Field(i)
		index := append(slices.Clone(at), i)
		if f.Type == posType {
			if f.IsExported() {
				fs.positions = append(fs.positions, index)
			}
			continue
		}
		tag := f.Tag.Get("yaml")
		name, options, _ := strings.Cut(tag, ",")
		if tag == "-" || !f.IsExported() && !f.Anonymous {
			continue
		}
		inline := slices.Contains(strings.Split(options, ","), "inline")
		if inline || f.Anonymous && name == "" {
			if f.Type.Kind() != reflect.Struct {
				panic(fmt.Sprintf("strictyaml: field %s of %s: only structs share their parent's mapping", f.Name, t))
			}
			fs.add(f.Type, index)
			continue
		}
		if name == "" {
			name = strings.ToLower(f.Name)
		}
		if fs.index[name] != nil {
			panic(fmt.Sprintf("strictyaml: two fields of %s are called %q", t, name))
		}
		fs.index[name] = index
		fs.names = append(fs.names, name)
		if kind := f.Tag.Get("path"); kind != "" {
			fs.files[name] = kind
		}
		fs.defaults[name] = f.Tag.Get("zero") == "default"
		if was := f.Tag.Get("former"); was != "" {
			fs.former[was] = name
		}
	}
}
