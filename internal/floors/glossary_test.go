// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// formerWords are words no longer used in exported names, keys, log keys and metrics, with their
// replacements.
var formerWords = map[string]string{
	"aside": "bypass", "beat": "tick", "birth": "nonce", "front": "lb", "fronts": "lb", "gates": "quarantines", "gate": "quarantine", "gated": "quarantined", "heir": "successor",
	"held": "by kind: buffered, served", "holder": "by kind: attacher, socket holder, reservation owner", "holders": "by kind", "judge": "evaluate", "judged": "evaluated",
	"live": "overrides, liveness", "mend": "recover", "metronome": "tick source", "most": "max", "outlived": "orphaned", "park": "buffer", "parked": "buffered",
	"patience": "timeout", "place": "by kind: index, attachment, location, client", "places": "by kind", "refuse": "reject", "settle": "reconcile", "settling": "starting", "sight": "verdict",
	"signers": "ca", "site": "instance", "stranger": "unknown source", "strangers": "unknown sources", "sync": "reconcile", "tap": "buffer",
	"took": "accept", "want": "spec", "whole": "complete", "why": "reason",
}

// otherMeanings are names with such a word in another meaning.
var otherMeanings = map[string]string{
	"ErrLive":          "handoff/lb: an open connection, as in live session",
	"Live":             "handoff/move/explore: the application has its socket",
	"Refuse":           "feature.Plan: the answer to an outage, no transfer",
	"ForeignRefuse":    "steer: the action for another's program",
	"PublishInPlace":   "steer/engine: over the previous one",
	"SocketsHeld":      "steer/engine: by the socket holder",
	"Held":             "internal/guardstate: as guard.h has it",
	"Strangers":        "internal/accept: peers not admitted yet",
	"Holders":          "internal/pidfd: processes with a file open",
	"Whole":            "filter/expr: the value of a field, not a part of it",
	"holds":            "lab",
	"SocketHolder":     "a kind",
	"KeepSocketHolder": "a kind", "PokeSocketHolder": "a kind", "StartSocketHolder": "a kind", "SocketHolderCommand": "a kind", "SocketHolderProcess": "a kind",
	"ProblemSocketHolder": "a kind",
}

// named is a public name and its position.
type named struct{ name, kind, at string }

// TestGlossary checks that public names use one word for one thing.
func TestGlossary(t *testing.T) {
	root := repository(t)
	var all []named
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, p)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (rel == "lab" || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && rel != "." || forTests(rel)):
			return filepath.SkipDir
		case d.IsDir(), filepath.Ext(p) != ".go", strings.HasSuffix(p, "_test.go"), strings.Contains(filepath.Base(p), "_bpfe"):
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		names, err := namesIn(filepath.ToSlash(rel), text)
		all = append(all, names...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, n := range all {
		kinds[n.kind]++
		if problem := n.problem(); problem != "" {
			t.Error(problem)
		}
	}
	for _, kind := range []string{"exported name", "key", "log key", "metric"} {
		if kinds[kind] < 50 {
			t.Errorf("%d names of kind %q found: is this test looking in the right place?", kinds[kind], kind)
		}
	}
}

func (n named) problem() string {
	if otherMeanings[n.name] != "" {
		return ""
	}
	for _, w := range wordsOf(n.name) {
		if say := formerWords[w]; say != "" {
			return fmt.Sprintf("%s: %s %s contains %q: use %s, or add its meaning to otherMeanings of internal/floors", n.at, n.kind, n.name, w, say)
		}
	}
	return ""
}

var wordPattern = regexp.MustCompile(`[A-Z]+(?:[^a-zA-Z]|$)|[A-Z]?[a-z]+|[A-Z]+`)

// wordsOf splits a name at underscores and capitals.
func wordsOf(name string) (out []string) {
	for _, w := range wordPattern.FindAllString(name, -1) {
		out = append(out, strings.ToLower(strings.Trim(w, "_0123456789")))
	}
	return out
}

var logMethods = []string{"Debug", "Info", "Warn", "Error", "With"}

// namesIn returns the public names in a file.
func namesIn(file string, text []byte) (out []named, err error) {
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	add := func(name, kind string, pos token.Pos) {
		out = append(out, named{name, kind, fmt.Sprintf("%s:%d", file, set.Position(pos).Line)})
	}
	exported := func(ids ...*ast.Ident) {
		for _, id := range ids {
			if id.IsExported() {
				add(id.Name, "exported name", id.Pos())
			}
		}
	}
	for _, d := range tree.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			exported(d.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					exported(s.Name)
				case *ast.ValueSpec:
					exported(s.Names...)
				}
			}
		}
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Field:
			exported(n.Names...)
			if n.Tag == nil {
				return true
			}
			tag, _ := strconv.Unquote(n.Tag.Value)
			for _, k := range []string{"yaml", "json"} {
				if name, _, _ := strings.Cut(reflect.StructTag(tag).Get(k), ","); name != "" && name != "-" {
					add(name, "key", n.Pos())
				}
			}
		case *ast.CallExpr:
			callNames(n, add)
		}
		return true
	})
	return out, nil
}

// callNames adds the keys of a log call, and the name of a described metric.
func callNames(call *ast.CallExpr, add func(name, kind string, pos token.Pos)) {
	literal := func(e ast.Expr) string {
		if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
			s, _ := strconv.Unquote(l.Value)
			return s
		}
		return ""
	}
	name := ""
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		name = f.Sel.Name
	case *ast.Ident:
		name = f.Name
	}
	switch {
	case (name == "desc" || name == "NewDesc") && len(call.Args) > 1 && literal(call.Args[0]) != "":
		add(literal(call.Args[0]), "metric", call.Pos())
	case slices.Contains(logMethods, name):
		first := 1
		if name == "With" {
			first = 0
		}
		for i := first; i+1 < len(call.Args); i += 2 {
			if key := literal(call.Args[i]); key != "" {
				add(key, "log key", call.Args[i].Pos())
			}
		}
	}
}

// TestGlossaryFinds checks namesIn with a small file.
func TestGlossaryFinds(t *testing.T) {
	const text = "package x\n" +
		"type FrontPlace struct {\n\tParked int `json:\"parked\" yaml:\"hold_most\"`\n\tgate int\n}\n" +
		"const MostHosts = 1\n" +
		"var d = desc(\"gate_packets_total\", \"help\")\n" +
		"func (FrontPlace) Mend() { log.Warn(\"a word of a gate\", \"why\", 1, \"reason\", err) }\n"
	names, err := namesIn("x.go", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, n := range names {
		if n.problem() != "" {
			found[n.kind+" "+n.name] = true
		}
	}
	want := []string{"exported name FrontPlace", "exported name Mend", "exported name MostHosts", "exported name Parked", "key hold_most", "key parked", "log key why", "metric gate_packets_total"}
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}

// formerNames are former whole names with several meanings, and their replacements in declarations.
// The words of formerWords also count as whole names of unexported declarations.
var formerNames = map[string]string{
	"heir": "successor", "hold": "buffer, run, keep", "holder": "by kind", "leave": "execute, release, remove", "look": "check, read, poll", "mend": "recover",
	"park": "buffer", "place": "index, location, attachment, insert", "places": "by kind", "settle": "reconcile, finish", "settled": "by kind", "settling": "by kind",
	"site": "instance", "sync": "reconcile", "take": "accept, consume, remove, claim", "taken": "in use", "takes": "accepts", "took": "accepted",
}

// keptNames are declarations with such a name, and the reasons.
var keptNames = map[string]string{
	"feature/reroute/plan graph.settle": "Dijkstra's algorithm settles nodes",
}

// mostPattern matches an upper bound not called max.
var mostPattern = regexp.MustCompile(`^[mM]ost[A-Z]`)

// declaredIn returns the functions, methods, types, constants and variables of a file.
func declaredIn(file string, text []byte) (out []string, err error) {
	tree, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range tree.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			out = append(out, receiver(d)+d.Name.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					out = append(out, s.Name.Name)
				case *ast.ValueSpec:
					for _, n := range s.Names {
						out = append(out, n.Name)
					}
				}
			}
		}
	}
	return out, nil
}

// receiver returns the type of a method with a dot, "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name + "."
		default:
			return "."
		}
	}
}

// formerName returns the reason to rename a declaration, "" if there is none.
func formerName(dir, decl string) string {
	name := decl[strings.LastIndex(decl, ".")+1:]
	switch say := formerNames[name]; {
	case keptNames[dir+" "+decl] != "":
		return ""
	case say != "":
		return fmt.Sprintf("%s: %s is called %s: say %s, or give the reason in keptNames of internal/floors", dir, decl, name, say)
	case mostPattern.MatchString(name):
		return fmt.Sprintf("%s: %s is an upper bound: say max", dir, decl)
	}
	return ""
}

// TestFormerNames checks that no declaration of the product has a former name.
func TestFormerNames(t *testing.T) {
	root := repository(t)
	seen := map[string]bool{}
	n := 0
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, p)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (rel == "lab" || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && rel != "." || forTests(rel)):
			return filepath.SkipDir
		case d.IsDir(), filepath.Ext(p) != ".go", strings.HasSuffix(p, "_test.go"), strings.Contains(filepath.Base(p), "_bpfe"):
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		all, err := declaredIn(rel, text)
		dir := filepath.ToSlash(filepath.Dir(rel))
		for _, decl := range all {
			n++
			seen[dir+" "+decl] = true
			if problem := formerName(dir, decl); problem != "" {
				t.Error(problem)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for kept := range keptNames {
		if !seen[kept] {
			t.Errorf("%s is not there any more: take it off keptNames", kept)
		}
	}
	if n < 5000 {
		t.Errorf("%d declarations found: is this test looking in the right place?", n)
	}
}

// TestFormerNamesFinds checks the search with a small file.
func TestFormerNamesFinds(t *testing.T) {
	const text = "package x\ntype place struct{}\nfunc (p *place) settle() {}\nfunc (p set[T]) take() {}\nconst mostHosts = 1\nvar hold, kept int\nfunc mostly() {}\n"
	all, err := declaredIn("x.go", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, decl := range all {
		if formerName("x", decl) != "" {
			got = append(got, decl)
		}
	}
	if want := []string{"place", "place.settle", "set.take", "mostHosts", "hold"}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if formerName("feature/reroute/plan", "graph.settle") != "" {
		t.Error("a kept name is a former one")
	}
}
