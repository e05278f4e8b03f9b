// SPDX-License-Identifier: Apache-2.0

// Package floors checks the architecture: the imports between packages must follow
// docs/ARCHITECTURE.md.
package floors

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/weir-project/weir"

// floors numbers the top folders from the ground. A package imports only lower floors, and packages
// of its own folder. The packages below feature/ have their own floor, above the contract in
// feature/ itself.
var floors = map[string]int{
	"bpf": 0, "internal": 0,
	"kernel":  1,
	"clients": 1, // for other programs: small, and importing only internal
	"table":   2, "service": 2, "workload": 2,
	"feature": 3,
	// 4: feature/*
	"host": 5, "collector": 5, "examples": 5,
	"cmd": 6, "lab": 6, "vm": 6, "lint": 6, "release": 6,
}

const featureFloor = 4

// source is the imports and calls of one Go file.
type source struct {
	dir     string // from the root of the repository, "" for the root
	file    string
	test    bool
	imports []use
	pins    []use // calls to pin objects or to open pins
}

type use struct {
	name string // import path, or the call as written
	line int
}

func TestFloors(t *testing.T) {
	files := readAll(t, repository(t))
	if len(files) < 20 {
		t.Fatalf("only %d Go files found; is the root of the repository right?", len(files))
	}
	for _, v := range violations(files) {
		t.Error(v)
	}
}

// violations describes each violated rule in a sentence.
func violations(files []source) []string {
	var out []string
	for _, f := range files {
		at := func(u use) string { return fmt.Sprintf("%s:%d", path.Join(f.dir, f.file), u.line) }
		if _, ok := floorOf(f.dir); !ok {
			out = append(out, fmt.Sprintf("%s: folder %q stands on no floor: give it one in internal/floors and docs/ARCHITECTURE.md", path.Join(f.dir, f.file), f.dir))
			continue
		}
		for _, u := range f.imports {
			if rule := broken(f, u.name); rule != "" {
				out = append(out, fmt.Sprintf("%s: %s imports %s: %s", at(u), f.dir, strings.TrimPrefix(u.name, module+"/"), rule))
			}
		}
		if f.test || mayPin(f.dir) {
			continue
		}
		for _, u := range f.pins {
			out = append(out, fmt.Sprintf("%s: %s calls %s: only kernel/ pins objects and opens pins", at(u), f.dir, u.name))
		}
	}
	return out
}

// broken returns the rule violated by an import, "" if none.
func broken(f source, imported string) string {
	if imported == "github.com/cilium/ebpf/link" && !f.test && !mayPin(f.dir) {
		return "only kernel/ links programs to hooks; tests may, too"
	}
	if imported == "testing" && !f.test && !forTests(f.dir) {
		return "only tests, and packages named …test, use testing"
	}
	to, ours := strings.CutPrefix(imported, module+"/")
	if !ours {
		return ""
	}
	from, to := home(f.dir), home(to)
	target, ok := floorOf(to)
	own, _ := floorOf(from)
	switch {
	case !ok:
		return "it stands on no floor"
	case from == "clients/go/register" && to != from:
		return "programs with other libraries copy it: it stands on nothing of ours"
	case top(to) == "lab":
		if top(from) == "lab" {
			return ""
		}
		return "lab is a module of its own; only lab uses it"
	case top(to) == "collector" && top(from) != "collector" && top(from) != "lab" && from != "cmd/weir-collector":
		return "only cmd/weir-collector uses collector"
	case own == featureFloor && target == featureFloor:
		if feature(from) == feature(to) {
			return wrongRoom(from, to)
		}
		if f.test && to == "feature/featuretest" {
			return ""
		}
		return "features never import each other; move shared code down a floor"
	case top(from) == "lab" && top(to) != "cmd":
		return ""
	case top(from) == "cmd" && top(to) == "cmd":
		return wrongPart(from, to)
	case target < own || top(from) == top(to) && target == own:
		return ""
	}
	return fmt.Sprintf("floor %d may use only lower floors, not floor %d", own, target)
}

// rooms are the packages of a feature with an internal order, from the ground. A room imports only
// earlier rooms. The feature's own package is last.
var rooms = map[string][]string{
	"feature/steer": {"bpf", "spec", "record", "slots", "engine", "sockholder", "bindings", "state", "reset", "templates", "explain", "daemon", ""},
}

// wrongRoom returns the rule violated by an import between two packages of a feature, "" if none.
func wrongRoom(from, to string) string {
	house := "feature/" + feature(from)
	order, ok := rooms[house]
	if !ok || from == to {
		return ""
	}
	room := func(dir string) int {
		return slices.Index(order, strings.TrimPrefix(strings.TrimPrefix(dir, house), "/"))
	}
	switch {
	case room(from) < 0 || room(to) < 0:
		return fmt.Sprintf("one of them is no room of %s: give it a place in rooms of internal/floors", house)
	case room(to) > room(from):
		return fmt.Sprintf("the rooms of %s import downward only: %s", house, strings.Join(order[:len(order)-1], ", "))
	}
	return ""
}

// wrongPart returns the rule violated by an import between two packages of cmd, "" if none. A
// command's parts are in its folder, one per feature, and share cli.
func wrongPart(from, to string) string {
	if from == to || from == path.Dir(to) || to == path.Dir(from)+"/cli" {
		return ""
	}
	return "a command imports its own parts, and a part imports cli alone"
}

// home returns the folder of a package by its role. The handoff client implements the feature's
// protocol, so it belongs to the feature.
func home(dir string) string {
	if rest, ok := strings.CutPrefix(dir, "clients/go/handoff"); ok {
		return "feature/handoff" + rest
	}
	return dir
}

// forTests reports whether a package's name marks it as test code.
func forTests(dir string) bool { return strings.HasSuffix(dir, "test") }

func floorOf(dir string) (int, bool) {
	n, ok := floors[top(dir)]
	if ok && strings.HasPrefix(dir, "feature/") {
		n = featureFloor
	}
	return n, ok
}

// mayPin reports whether a package may pin and link. The packages below kernel import it but may
// not: hook attaches without kernel links, probe tests facilities, instances lets kernel pin.
func mayPin(dir string) bool {
	return dir == "kernel" || strings.HasPrefix(dir, "kernel/internal/") || slices.Contains([]string{"internal", "lab"}, top(dir))
}

// top returns the first element of a path, feature the second.
func top(dir string) string {
	first, _, _ := strings.Cut(dir, "/")
	return first
}

func feature(dir string) string { return top(strings.TrimPrefix(dir, "feature/")) }

// repository finds the root by its go.mod.
func repository(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if parent := filepath.Dir(dir); parent != dir {
			dir = parent
			continue
		}
		t.Fatal("no go.mod above the working directory")
	}
}

// readAll parses every Go file, for all build tags.
func readAll(t *testing.T, root string) []source {
	t.Helper()
	var files []source
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if p != root && (name == "testdata" || name[0] == '.' || name[0] == '_') {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(name) != ".go" {
			return nil
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := read(filepath.ToSlash(rel), text)
		files = append(files, f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func read(name string, text []byte) (source, error) {
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
	if err != nil {
		return source{}, err
	}
	f := source{dir: strings.TrimPrefix(path.Dir(name), "."), file: path.Base(name), test: strings.HasSuffix(name, "_test.go")}
	ebpf := false
	for _, i := range tree.Imports {
		imported, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			return source{}, err
		}
		ebpf = ebpf || strings.HasPrefix(imported, "github.com/cilium/ebpf")
		f.imports = append(f.imports, use{imported, set.Position(i.Pos()).Line})
	}
	if !ebpf {
		return f, nil // no objects to pin: runtime.Pinner also has a method Pin
	}
	pinning := []string{"Pin", "Unpin", "LoadPinnedMap", "LoadPinnedProgram", "LoadPinnedLink"}
	ast.Inspect(tree, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok && slices.Contains(pinning, s.Sel.Name) {
			f.pins = append(f.pins, use{s.Sel.Name, set.Position(s.Pos()).Line})
		}
		return true
	})
	return f, nil
}

// TestRules breaks each rule once in an imaginary file, and keeps it once in a similar case.
func TestRules(t *testing.T) {
	for _, c := range []struct{ file, imports, want string }{
		{"kernel/a.go", "internal/netns", ""},
		{"internal/nstest/a.go", "internal/netns", ""},
		{"feature/steer/a.go", "feature", ""},
		{"feature/steer/a.go", "feature/steer/engine", ""},
		{"feature/steer/engine/a.go", "feature/steer/spec", ""},
		{"feature/steer/engine/a.go", "feature/steer", "the rooms of feature/steer import downward only"},
		{"feature/steer/spec/a.go", "feature/steer/record", "the rooms of feature/steer import downward only"},
		{"feature/steer/x/a.go", "feature/steer/spec", "one of them is no room of feature/steer"},
		{"feature/guard/x/a.go", "feature/guard", ""},
		{"feature/steer/a_test.go", "internal/nstest", ""},
		{"host/a.go", "feature/steer", ""},
		{"cmd/weir/a.go", "host", ""},
		{"cmd/weir/a.go", "cmd/weir/guard", ""},
		{"cmd/weir/guard/a.go", "cmd/weir/cli", ""},
		{"cmd/weir/cli/a.go", "cmd/weir", "a command imports its own parts"},
		{"cmd/weir/cli/a.go", "cmd/weir/guard", "a part imports cli alone"},
		{"cmd/weir/guard/a.go", "cmd/weir/filter", "a part imports cli alone"},
		{"cmd/weir-collector/a.go", "cmd/weir/cli", "a command imports its own parts"},
		{"lab/cmd/weir-lab/a.go", "lab", ""},
		{"examples/register-go/a.go", "clients/go/register", ""},
		{"clients/go/guard/a.go", "internal/guardstate", ""},
		{"feature/guard/a_test.go", "clients/go/guard", ""},
		{"clients/go/guard/a.go", "kernel", "floor 1 may use only lower floors"},
		{"clients/go/register/a.go", "internal/netns", "it stands on nothing of ours"},
		{"clients/go/handoff/a.go", "feature/handoff/wire", ""},
		{"feature/handoff/backend/a.go", "clients/go/handoff", ""},
		{"clients/go/handoff/a.go", "feature/steer", "features never import each other"},
		{"feature/steer/a.go", "clients/go/handoff", "features never import each other"},
		{"lab/telemetry/a.go", "lab/routers", ""},
		{"lab/a.go", "host", ""},
		{"cmd/weir-collector/a.go", "collector", ""},
		{"kernel/a.go", "github.com/cilium/ebpf/link", ""},
		{"feature/steer/a_test.go", "github.com/cilium/ebpf/link", ""},
		{"internal/netns/a.go", "kernel", "internal/netns/a.go:3: internal/netns imports kernel: floor 0 may use only lower floors, not floor 1"},
		{"internal/netns/a.go", "bpf", "floor 0 may use only lower floors"},
		{"kernel/a_test.go", "service", "floor 1 may use only lower floors"},
		{"kernel/a.go", "testing", "kernel/a.go:3: kernel imports testing: only tests"},
		{"kernel/a_test.go", "testing", ""},
		{"kernel/kerneltest/a.go", "testing", ""},
		{"service/a.go", "table", "floor 2 may use only lower floors"},
		{"feature/a.go", "feature/steer", "floor 3 may use only lower floors"},
		{"feature/steer/a.go", "host", "floor 4 may use only lower floors"},
		{"feature/steer/a.go", "feature/guard", "feature/steer imports feature/guard: features never import each other"},
		{"feature/steer/a_test.go", "feature/guard", "features never import each other"},
		{"cmd/weir/a.go", "lab", "cmd/weir imports lab: lab is a module of its own; only lab uses it"},
		{"feature/steer/a_test.go", "lab/routers", "only lab uses it"},
		{"feature/steer/a_test.go", "feature/featuretest", ""},
		{"feature/steer/a.go", "feature/featuretest", "features never import each other"},
		{"host/a.go", "collector", "only cmd/weir-collector uses collector"},
		{"cmd/weir/a.go", "collector/store", "only cmd/weir-collector uses collector"},
		{"feature/steer/a.go", "github.com/cilium/ebpf/link", "only kernel/ links programs"},
		{"host/a.go", "github.com/cilium/ebpf/link", "only kernel/ links programs"},
		{"kernel/hook/a.go", "github.com/cilium/ebpf/link", "only kernel/ links programs"},
		{"kernel/internal/confined/a.go", "github.com/cilium/ebpf/link", ""},
		{"kernel/probe/a.go", "kernel", ""},
		{"attic/a.go", "fmt", `folder "attic" stands on no floor`},
		{"a.go", "fmt", `folder "" stands on no floor`},
		{"host/a.go", "attic", "stands on no floor"},
	} {
		imported := c.imports
		if strings.Contains(imported, "/cilium/") || imported == "fmt" || imported == "testing" {
			// as it is
		} else {
			imported = module + "/" + imported
		}
		f, err := read(c.file, fmt.Appendf(nil, "package a\n\nimport _ %q\n", imported))
		if err != nil {
			t.Fatal(err)
		}
		got := violations([]source{f})
		if c.want == "" && len(got) != 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("%s imports %s: got %q, want %q", c.file, c.imports, got, c.want)
		}
	}
}

func TestPinRule(t *testing.T) {
	const text = "package a\n\nimport \"github.com/cilium/ebpf\"\n\nvar m, _ = ebpf.LoadPinnedMap(\"/x\", nil)\n\nfunc f() { m.Pin(\"/y\") }\n"
	for file, want := range map[string]int{"feature/steer/a.go": 2, "host/a.go": 2, "feature/steer/a_test.go": 0, "kernel/a.go": 0, "kernel/probe/a.go": 2, "lab/a.go": 0} {
		f, err := read(file, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		got := violations([]source{f})
		if len(got) != want || want > 0 && !strings.Contains(got[0], "a.go:5: ") {
			t.Errorf("%s: %q, want %d violations", file, got, want)
		}
	}
}
