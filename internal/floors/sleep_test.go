// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// maxSleeps is the maximum number of sleeps per 1,000 lines of tests. A sleep is too short on a
// slow machine and too long on any other. nstest.Eventually waits for a state, and nstest.Steadily
// checks that it remains.
const maxSleeps = 1.0

// slept counts the sleeps and lines of a package's tests.
type slept struct{ sleeps, lines int }

func TestSleeps(t *testing.T) {
	tests, err := testSleeps(repository(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(tests) < 50 {
		t.Fatalf("only %d packages with tests found", len(tests))
	}
	if problem := sleepProblem(tests); problem != "" {
		t.Error(problem)
	}
}

// TestSleepProblem checks sleepProblem with a few counts.
func TestSleepProblem(t *testing.T) {
	tests := map[string]slept{"a": {1, 1500}, "b": {1, 400}, "c": {0, 100}}
	if problem := sleepProblem(tests); problem != "" {
		t.Errorf("2 sleeps in 2,000 lines: %s", problem)
	}
	tests["c"] = slept{3, 100}
	if problem := sleepProblem(tests); !strings.Contains(problem, "5 times in 2000 lines") || !strings.Contains(problem, "most: c 3, a 1, b 1") {
		t.Errorf("5 sleeps in 2,000 lines: %q", problem)
	}
	const text = `package x
import pause "time"
import "testing/synctest"
func f() {
	synctest.Test(t, func(t *testing.T) { pause.Sleep(1) })
	pause.Sleep(1)
	<-pause.After(1)
	for ; ; pause.Sleep(1) {}
	select { case <-pause.After(1): }
	x := <-pause.After(1)
	time.Sleep(1)
	go func() { pause.Sleep(1) }()
}`
	if n, err := sleeps("x_test.go", []byte(text)); n != 4 || err != nil {
		t.Errorf("%d sleeps, %v; want 4", n, err)
	}
}

// sleepProblem names the packages with most sleeps, if the total is over the limit.
func sleepProblem(tests map[string]slept) string {
	var all slept
	for _, s := range tests {
		all.sleeps, all.lines = all.sleeps+s.sleeps, all.lines+s.lines
	}
	if float64(all.sleeps) <= maxSleeps*float64(all.lines)/1000 {
		return ""
	}
	dirs := slices.SortedFunc(maps.Keys(tests), func(a, b string) int {
		return cmp.Or(tests[b].sleeps-tests[a].sleeps, strings.Compare(a, b))
	})
	var most []string
	for _, dir := range dirs[:min(len(dirs), 8)] {
		most = append(most, fmt.Sprint(dir, " ", tests[dir].sleeps))
	}
	return fmt.Sprintf("tests sleep %d times in %d lines, but at most %v per 1,000 are allowed: wait with nstest.Eventually, or check with nstest.Steadily; most: %s",
		all.sleeps, all.lines, maxSleeps, strings.Join(most, ", "))
}

// testSleeps counts by folder, in test files and in packages for tests, with names ending in test.
func testSleeps(root string) (map[string]slept, error) {
	tests := map[string]slept{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && path != root && (name == "testdata" || name[0] == '.' || name[0] == '_') {
			return filepath.SkipDir
		}
		helper := strings.HasSuffix(filepath.Base(filepath.Dir(path)), "test")
		if d.IsDir() || !strings.HasSuffix(name, ".go") || !helper && !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || bytes.HasPrefix(text, []byte("// Code generated ")) {
			return err
		}
		n, err := sleeps(path, text)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		s := tests[dir]
		tests[dir] = slept{s.sleeps + n, s.lines + bytes.Count(text, []byte("\n"))}
		return err
	})
	return tests, err
}

// sleeps counts calls of time.Sleep, and statements that only wait for time.After. Time in a
// synctest bubble is not real, so nothing counts there.
func sleeps(path string, text []byte) (n int, err error) {
	if !bytes.Contains(text, []byte(`"time"`)) {
		return 0, nil
	}
	f, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	clock, bubble := importedAs(f, "time"), importedAs(f, "testing/synctest")
	cases := map[ast.Stmt]bool{} // of select: time.After is a deadline there
	ast.Inspect(f, func(node ast.Node) bool {
		switch x := node.(type) {
		case *ast.CommClause:
			cases[x.Comm] = true
		case *ast.CallExpr:
			if calls(x, bubble, "Test") {
				return false // time passes at once in there
			}
			if calls(x, clock, "Sleep") {
				n++
			}
		case *ast.ExprStmt:
			if r, ok := x.X.(*ast.UnaryExpr); ok && !cases[x] && r.Op == token.ARROW && calls(r.X, clock, "After") {
				n++
			}
		}
		return true
	})
	return n, nil
}

// importedAs returns the name of a package in a file, "" if it is not imported.
func importedAs(f *ast.File, path string) string {
	for _, i := range f.Imports {
		switch {
		case i.Path.Value != strconv.Quote(path):
		case i.Name != nil:
			return i.Name.Name
		default:
			return path[strings.LastIndex(path, "/")+1:]
		}
	}
	return ""
}

// calls reports whether an expression calls a function of a package.
func calls(e ast.Expr, pkg, function string) bool {
	c, ok := e.(*ast.CallExpr)
	if !ok {
		return false
	}
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != function {
		return false
	}
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == pkg
}
