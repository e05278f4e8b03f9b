// SPDX-License-Identifier: Apache-2.0

// Package links checks the links between the project's pages: files, folders,
// pictures and headings.
package links

import (
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
)

var markdown = goldmark.New(goldmark.WithExtensions(extension.GFM))

// page is a parsed Markdown file.
type page struct {
	links   []string
	anchors map[string]bool // of its headings
}

func TestLinks(t *testing.T) {
	root := repository(t)
	pages, checked := map[string]page{}, 0
	for _, name := range markdownFiles(t, root) {
		src, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		pages[name] = parse(src)
	}
	for name, p := range pages {
		for _, link := range p.links {
			checked++
			if problem := broken(root, name, link, pages); problem != "" {
				t.Errorf("%s: link to %s: %s", name, link, problem)
			}
		}
	}
	if len(pages) < 30 || checked < 100 {
		t.Errorf("only %d links in %d pages were found", checked, len(pages))
	}
}

// broken returns why a link of the page does not lead anywhere, or "". Links
// to other sites are not followed: tests need no network.
func broken(root, from, link string, pages map[string]page) string {
	u, err := url.Parse(link)
	if err != nil {
		return err.Error()
	}
	if u.Scheme != "" {
		return ""
	}
	to := from
	if u.Path != "" {
		to = path.Join(path.Dir(from), u.Path)
		if _, err := os.Stat(filepath.Join(root, to)); err != nil {
			return "no such file"
		}
	}
	if u.Fragment == "" {
		return ""
	}
	if p, ok := pages[to]; !ok || !p.anchors[u.Fragment] {
		return "no such heading"
	}
	return ""
}

func parse(src []byte) page {
	p := page{anchors: map[string]bool{}}
	_ = ast.Walk(markdown.Parser().Parse(text.NewReader(src)), func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Link:
			p.links = append(p.links, string(n.Destination))
		case *ast.Image:
			p.links = append(p.links, string(n.Destination))
		case *ast.RawHTML:
			p.links = append(p.links, htmlLinks(n.Segments.Value(src))...)
		case *ast.HTMLBlock:
			p.links = append(p.links, htmlLinks(n.Lines().Value(src))...)
		case *ast.Heading:
			p.anchors[anchor(string(n.Lines().Value(src)))] = true
		}
		return ast.WalkContinue, nil
	})
	return p
}

var attribute = regexp.MustCompile(`\b(?:src|srcset|href)="([^"]+)"`)

func htmlLinks(html []byte) (out []string) {
	for _, m := range attribute.FindAllSubmatch(html, -1) {
		out = append(out, string(m[1]))
	}
	return out
}

var (
	linkText = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	dropped  = regexp.MustCompile(`[^\pL\pN _-]`)
)

// anchor is the fragment of a heading on the usual forges: lower case, no
// punctuation, dashes for spaces.
func anchor(heading string) string {
	heading = linkText.ReplaceAllString(heading, "$1")
	return strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-")
}

func TestBroken(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "docs/img"), 0o755); err != nil {
		t.Fatal(err)
	}
	const src = "# One page: `weir lb` & more\n\n[a](#one-page-weir-lb--more) [b](other.md#two) ![c](img/c.svg)\n\n<img src=\"img/d.svg\">\n"
	if err := os.WriteFile(filepath.Join(root, "docs/a.md"), []byte(src), 0o644); err != nil {
		t.Fatal(err)
	}
	p := parse([]byte(src))
	pages := map[string]page{"docs/a.md": p}
	want := map[string]string{
		"#one-page-weir-lb--more": "", "other.md#two": "no such file", "img/c.svg": "no such file", "img/d.svg": "no such file",
	}
	if len(p.links) != len(want) {
		t.Errorf("links %q", p.links)
	}
	for link, problem := range want {
		if got := broken(root, "docs/a.md", link, pages); got != problem {
			t.Errorf("%s: %q, want %q", link, got, problem)
		}
	}
	if got := broken(root, "docs/a.md", "a.md#two", pages); got != "no such heading" {
		t.Errorf("a missing heading: %q", got)
	}
}

func repository(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func markdownFiles(t *testing.T, root string) []string {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, name := range strings.Fields(string(out)) {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil {
			names = append(names, name)
		}
	}
	return names
}

var namedTest = regexp.MustCompile("\\[`((?:Test|Fuzz)[A-Za-z0-9]+)`\\]\\(([^)]+)\\)")

// Tests named on a page exist in the linked file.
func TestNamedTests(t *testing.T) {
	root, found := repository(t), 0
	for _, name := range markdownFiles(t, root) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range namedTest.FindAllStringSubmatch(string(text), -1) {
			found++
			code, err := os.ReadFile(filepath.Join(root, path.Dir(name), m[2]))
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if !strings.Contains(string(code), "\nfunc "+m[1]+"(") {
				t.Errorf("%s: %s has no %s", name, m[2], m[1])
			}
		}
	}
	if found < 30 {
		t.Errorf("only %d tests named on pages were found", found)
	}
}
