// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"bufio"
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// goMod is the content of a go.mod file.
type goMod struct {
	path, version string            // of module and go
	direct        map[string]string // module path → version
	all           map[string]string // with the indirect ones
	replaced      map[string]string // module path → folder
}

// TestModules checks both modules. The product requires nothing only for the lab. The lab builds on
// this checkout's product and its versions of shared libraries.
func TestModules(t *testing.T) {
	root := repository(t)
	weir, lab := readMod(t, filepath.Join(root, "go.mod")), readMod(t, filepath.Join(root, "lab/go.mod"))
	files := readAll(t, root)
	for _, s := range unused(weir, files, func(f source) bool { return top(f.dir) != "lab" }) {
		t.Errorf("go.mod requires %s for lab alone, or for nothing: run go mod tidy", s)
	}
	for _, s := range unused(lab, files, func(f source) bool { return top(f.dir) == "lab" }) {
		t.Errorf("lab/go.mod requires %s, and no file of lab imports it: run go mod tidy in lab", s)
	}
	if weir.path != module || lab.path != module+"/lab" || lab.replaced[module] != "../" {
		t.Errorf("modules %s and %s with %v: want %s, and lab on top of ../", weir.path, lab.path, lab.replaced, module)
	}
	if weir.version != lab.version {
		t.Errorf("go %s in go.mod, %s in lab/go.mod: want the same", weir.version, lab.version)
	}
	for p, version := range weir.all {
		if has, ok := lab.all[p]; ok && has != version {
			t.Errorf("%s is %s in go.mod and %s in lab/go.mod: experiments must run the product's version", p, version, has)
		}
	}
	if weir.all[module+"/lab"] != "" {
		t.Error("go.mod requires lab")
	}
}

// unused returns the direct requirements of m without an importer among the files that belong.
func unused(m goMod, files []source, belongs func(source) bool) []string {
	left := maps.Clone(m.direct)
	for _, f := range files {
		if !belongs(f) {
			continue
		}
		for _, u := range f.imports {
			for p := range left {
				if u.name == p || strings.HasPrefix(u.name, p+"/") {
					delete(left, p)
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(left))
}

func readMod(t *testing.T, file string) goMod {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m := parseMod(text)
	if len(m.direct) < 3 || len(m.all) < 10 {
		t.Fatalf("%s: %d requirements found, %d of them direct", file, len(m.all), len(m.direct))
	}
	return m
}

func parseMod(text []byte) goMod {
	m := goMod{direct: map[string]string{}, all: map[string]string{}, replaced: map[string]string{}}
	block := ""
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line, comment, _ := strings.Cut(lines.Text(), "//")
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			continue
		case words[0] == ")":
			block = ""
			continue
		case words[len(words)-1] == "(":
			block = words[0]
			continue
		case block != "":
			words = append([]string{block}, words...)
		}
		switch words[0] {
		case "module":
			m.path = words[1]
		case "go":
			m.version = words[1]
		case "replace":
			m.replaced[words[1]] = words[len(words)-1]
		case "require":
			m.all[words[1]] = words[2]
			if strings.TrimSpace(comment) != "indirect" {
				m.direct[words[1]] = words[2]
			}
		}
	}
	return m
}

// TestUnused breaks the rule in imaginary files.
func TestUnused(t *testing.T) {
	m := parseMod([]byte("module m\n\nrequire example.org/quic v1.0.0\n\nrequire (\n\texample.org/x/net v0.1.0\n\texample.org/far v0.2.0 // indirect\n)\n"))
	files := []source{
		{dir: "kernel", imports: []use{{name: "example.org/x/net/bpf"}, {name: "example.org/quicker"}}},
		{dir: "lab/reload", imports: []use{{name: "example.org/quic"}}},
	}
	got := unused(m, files, func(f source) bool { return top(f.dir) != "lab" })
	if !slices.Equal(got, []string{"example.org/quic"}) || len(m.all) != 3 {
		t.Errorf("unused %v of %v, want quic of three", got, m.all)
	}
}
