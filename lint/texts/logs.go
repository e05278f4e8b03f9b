// SPDX-License-Identifier: Apache-2.0

package texts

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	levels = map[string]string{
		"Debug": "DEBUG", "Info": "INFO", "Warn": "WARN", "Error": "ERROR",
		"DebugContext": "DEBUG", "InfoContext": "INFO", "WarnContext": "WARN", "ErrorContext": "ERROR",
	}
	loggerPattern = regexp.MustCompile(`(?i)(?:^|\.)\w*(?:log|logger)(?:\(.*\))?$`)
)

// logMessages lists the log messages of the product's Go code below root: a
// line with the folder, then a line for each message with its level and keys,
// sorted. Expressions inside a message are in braces.
func logMessages(root string) ([]string, error) {
	found := map[string][]string{} // by folder
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel == "lab" || rel == "lint" || d.Name() == "testdata" || rel != "." && strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "_test.go") {
			return nil
		}
		messages, err := messagesOf(file)
		if dir := filepath.Dir(rel); len(messages) > 0 {
			found[dir] = append(found[dir], messages...)
		}
		return err
	})
	var lines []string
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		lines = append(lines, dir)
		slices.Sort(found[dir])
		for _, m := range slices.Compact(found[dir]) {
			lines = append(lines, "  "+m)
		}
	}
	return lines, err
}

// messagesOf finds the calls of loggers in a file.
func messagesOf(file string) ([]string, error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var out []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		f, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || !loggerPattern.MatchString(source(fset, f.X)) {
			return true
		}
		level, args := levels[f.Sel.Name], call.Args
		if strings.HasSuffix(f.Sel.Name, "Context") && len(args) > 0 {
			args = args[1:]
		}
		if (f.Sel.Name == "Log" || f.Sel.Name == "LogAttrs") && len(args) > 2 {
			level, args = "LEVEL", args[2:]
		}
		if level == "" || len(args) == 0 {
			return true
		}
		out = append(out, fmt.Sprintf("%-5s %s%s", level, message(fset, args[0]), keys(args[1:])))
		return true
	})
	return out, nil
}

// message is a message as a reader sees it, with expressions in braces.
func message(fset *token.FileSet, e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil {
			return s
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return message(fset, e.X) + message(fset, e.Y)
		}
	case *ast.ParenExpr:
		return message(fset, e.X)
	case *ast.CallExpr:
		if source(fset, e.Fun) == "fmt.Sprintf" && len(e.Args) > 0 {
			return message(fset, e.Args[0])
		}
	}
	return "{" + source(fset, e) + "}"
}

// keys are the literal keys of a call's attributes, in parentheses.
func keys(args []ast.Expr) string {
	var names []string
	for i := 0; i < len(args); i++ {
		switch a := args[i].(type) {
		case *ast.BasicLit:
			if s, err := strconv.Unquote(a.Value); err == nil {
				names = append(names, s)
			}
			i++ // its value
		case *ast.CallExpr: // slog.String("key", value)
			if len(a.Args) == 2 {
				if lit, ok := a.Args[0].(*ast.BasicLit); ok {
					if s, err := strconv.Unquote(lit.Value); err == nil {
						names = append(names, s)
					}
				}
			}
		}
	}
	if len(names) == 0 {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}

func source(fset *token.FileSet, e ast.Expr) string {
	var b strings.Builder
	if err := printer.Fprint(&b, fset, e); err != nil {
		return "?"
	}
	return strings.Join(strings.Fields(b.String()), " ")
}
