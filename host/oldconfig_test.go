// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/weir-project/weir/internal/releasetest"
	"github.com/weir-project/weir/internal/strictyaml"
)

// Each configuration of a release is valid, and each of its values is read as that release read it.
func TestConfigsOfReleases(t *testing.T) {
	for _, version := range releasetest.Versions(t, "config") {
		forFiles(t, filepath.Join("testdata", version, "config", "*.yaml"), func(t *testing.T, path, _ string, data []byte) {
			c, err := LoadConfig(path)
			if err != nil {
				t.Fatalf("a configuration of weir %s: keep its keys and values valid: %v", version, err)
			}
			now, err := json.MarshalIndent(c.Document(), "", "\t")
			if err != nil {
				t.Fatal(err)
			}
			dir, _ := os.Getwd() // names of files are absolute
			now = []byte(strings.ReplaceAll(string(now), dir, "DIR") + "\n")
			golden := strings.TrimSuffix(path, ".yaml") + ".json"
			if version == releasetest.Writing() {
				if err := os.WriteFile(golden, now, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			was, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			for _, lost := range releasetest.Lost(was, now) {
				t.Errorf("weir %s read another value: %s", version, lost)
			}
		})
	}
}

// The configurations of the newest version use every key. A new key after a release needs a file in a directory of the
// next version.
func TestConfigsOfReleasesUseEveryKey(t *testing.T) {
	versions := releasetest.Versions(t, "config")
	used := map[string]bool{}
	files, err := filepath.Glob(filepath.Join("testdata", versions[len(versions)-1], "config", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var doc yaml.Node
		if err := yaml.Unmarshal(data, &doc); err != nil {
			t.Fatal(err)
		}
		usedKeys(used, "", reflect.TypeFor[Config](), doc.Content[0])
	}
	all := map[string]bool{}
	everyKey(all, "", reflect.TypeFor[Config](), nil)
	for key := range all {
		if !used[key] {
			t.Errorf("key %s: no file of host/testdata/%s/config uses it: add it to a file of the next version there", key, versions[len(versions)-1])
		}
	}
	if len(all) < 150 || !all["services.*.steer.generations.idle"] || !all["handoff.backend.lb.names"] || !all["filter.rules.match"] {
		t.Errorf("only %d keys were found", len(all))
	}
	delete(used, "services.*.steer.slots")
	if used["services.*.steer.slots"] || !all["services.*.steer.slots"] {
		t.Error("a missing key is not noticed")
	}
}

// keysOf lists the keys of a struct with the types of their values.
func keysOf(t reflect.Type) (out map[string]reflect.Type) {
	out = map[string]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case f.Type == reflect.TypeFor[strictyaml.Pos]() || name == "-" || !f.IsExported():
		case options == "inline":
			for k, v := range keysOf(f.Type) {
				if _, own := out[k]; !own {
					out[k] = v
				}
			}
		case name == "":
			out[strings.ToLower(f.Name)] = f.Type
		default:
			out[name] = f.Type
		}
	}
	if x, ok := reflect.New(t).Interface().(interface {
		Keys() []string
		Section(key string) any
	}); ok {
		for _, k := range x.Keys() {
			out[k] = reflect.TypeOf(x.Section(k))
		}
	}
	return out
}

// branches returns the keys of a value of type t, through pointers, lists and maps; nil: it is a leaf.
func branches(t reflect.Type) (keys map[string]reflect.Type, step string, next reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	_, node := reflect.New(t).Interface().(strictyaml.Node)
	_, text := reflect.New(t).Interface().(encoding.TextUnmarshaler)
	switch {
	case t.String() == "feature.nest":
		return nest, "", nil
	case node || text:
		return nil, "", nil
	case t.Kind() == reflect.Slice:
		return nil, "", t.Elem()
	case t.Kind() == reflect.Map && t.Elem().Kind() != reflect.String:
		return nil, ".*", t.Elem()
	case t.Kind() == reflect.Struct:
		return keysOf(t), "", nil
	}
	return nil, "", nil
}

// nest has the sections below handoff.
var nest = func() map[string]reflect.Type {
	out := map[string]reflect.Type{}
	c := &Config{}
	x := c.Section("handoff").(interface {
		Keys() []string
		Section(key string) any
	})
	for _, k := range x.Keys() {
		out[k] = reflect.TypeOf(x.Section(k))
	}
	return out
}()

func everyKey(all map[string]bool, at string, t reflect.Type, seen []reflect.Type) {
	if slices.Contains(seen, t) {
		return
	}
	keys, step, next := branches(t)
	if next != nil {
		everyKey(all, at+step, next, append(seen, t))
	}
	for k, v := range keys {
		key := strings.TrimPrefix(at+"."+k, ".")
		all[key] = true
		everyKey(all, key, v, append(seen, t))
	}
}

func usedKeys(used map[string]bool, at string, t reflect.Type, n *yaml.Node) {
	keys, step, next := branches(t)
	switch n.Kind {
	case yaml.SequenceNode:
		for _, c := range n.Content {
			if next != nil {
				usedKeys(used, at, next, c)
			}
		}
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			if next != nil {
				usedKeys(used, at+step, next, n.Content[i+1])
			} else if v, ok := keys[n.Content[i].Value]; ok {
				key := strings.TrimPrefix(at+"."+n.Content[i].Value, ".")
				used[key] = true
				usedKeys(used, key, v, n.Content[i+1])
			}
		}
	}
}
