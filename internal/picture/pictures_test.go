// SPDX-License-Identifier: Apache-2.0

package picture_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/picture"
	"github.com/weir-project/weir/internal/picture/picturetest"
)

// visit calls f for each file of the repository with an extension.
func visit(t *testing.T, extension string, f func(name string, content []byte)) {
	t.Helper()
	root := "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != extension {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		f(filepath.ToSlash(name), content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// All pictures of the pages have a title, colours for dark pages, and readable texts apart from each other.
func TestPagePictures(t *testing.T) {
	n := 0
	visit(t, ".svg", func(name string, svg []byte) {
		n++
		for _, problem := range slices.Concat(picturetest.Problems(svg), picturetest.SmallTexts(svg)) {
			t.Errorf("%s: %s", name, problem)
		}
	})
	if n < 20 {
		t.Errorf("only %d pictures found", n)
	}
}

// A plot has a title, and a unit at each axis.
func TestPlot(t *testing.T) {
	points := [][2]float64{{0.1, 2}, {3, 0.2}, {4000, 0.001}}
	axis := picture.Axis{Title: "latency", Unit: "ms", Low: 1, High: 100000}
	svg := picture.Plot{Title: "A & B", X: axis, Y: picture.Axis{Title: "requests", Unit: "%", Low: 0.0005, High: 1, Scale: 100},
		Curves: []picture.Curve{{Name: "with <it>", Points: points}, {Name: "without it, in a long name", Second: true, Dashed: true, Points: points}}}.SVG()
	for _, problem := range picturetest.PlotProblems(svg) {
		t.Error(problem)
	}
	for _, want := range []string{"latency (ms)", "requests (%)", "A &amp; B", ">100,000<", ">0.1<", "dashed"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("%q is missing in\n%s", want, svg)
		}
	}
}

// The search for faults finds each kind.
func TestProblems(t *testing.T) {
	const svg = `<svg viewBox="0 0 100 100" font-size="10"><style>.e { text-anchor: end }</style>
<text x="10" y="20">one</text><text class="e" x="40" y="22">two</text><text x="90" y="60">outside</text><text class="axis" x="10" y="80" font-size="4" fill="#000">time</text></svg>`
	all := strings.Join(slices.Concat(picturetest.PlotProblems([]byte(svg)), picturetest.SmallTexts([]byte(svg))), "\n")
	for _, want := range []string{"no title", "no colours for dark pages", `"two" lies on "one"`, `"outside" is outside`, `fill="#000"`,
		`axis "time" has no unit`, "1 of 2 axes", "no visible title", `"time": 4.0 pixels`} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
}

// writers are the packages with SVG of their own: both have tests by picturetest.
var writers = []string{"internal/picture", "lab/cast"}

// All other programs draw through this package. So each picture has a title and both colour schemes.
func TestWriters(t *testing.T) {
	visit(t, ".go", func(name string, source []byte) {
		if !strings.HasSuffix(name, "_test.go") && bytes.Contains(source, []byte("<svg ")) && !slices.Contains(writers, filepath.Dir(name)) {
			t.Errorf("%s writes SVG: use internal/picture", name)
		}
	})
}
